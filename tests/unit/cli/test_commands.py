"""Commands as a user types them, in a separate process where the process itself is under test."""

import base64
import csv
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.typed import run_vivace as vivace

VIVACE = [sys.executable, "-m", "vivace"]
QUICK = ["--num-inference-steps", "2", "--repeats", "1", "--rounds", "1", "--warmup", "1"]


def run_process(folder: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*VIVACE, *arguments], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def cpu_seconds(run: Callable[[], object]) -> float:
    """Return the CPU time of the processes that a function starts and waits for."""
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    run()
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime


def test_help_is_fast_and_imports_no_torch(tmp_path: Path) -> None:
    heavy = "{'torch', 'diffusers', 'transformers', 'numpy', 'scipy', 'PIL', 'jinja2', 'rich', 'pydantic'}"
    code = f"import sys, vivace, vivace.cli.commands\nprint(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    code = "import sys, vivace.answers.page, vivace.report.run_answer\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    text = run_process(tmp_path, "--help").stdout
    # What --help imports is held above, exactly. The time is a loose bound: CPU time of one command varies twofold
    # with what shares the core.
    libraries = [sys.executable, "-c", "import click, numpy, pydantic, rich.console"]
    took = min(cpu_seconds(lambda: run_process(tmp_path, "--help")) for _ in range(3))
    usual = min(cpu_seconds(lambda: subprocess.run(libraries, check=True)) for _ in range(3))
    assert took < max(1.0, 5 * usual), "the command costs far more than the libraries that it needs"
    for command in ("bench", "demo", "doctor", "generate", "models", "report", "techniques"):
        assert command in text


@pytest.mark.parametrize("run", [vivace, run_process], ids=["here", "in a process"])
@pytest.mark.quick("here")
def test_generate_writes_the_same_bytes_with_metadata(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    command = ["generate", "A red circle, \u00fcber & <b>"]
    command += ["--recipe", "steps:1+tiny_vae", "--seed", "5", "--num-images", "2"]
    first = run(tmp_path, *command, "--out", "a").stdout.split()
    assert first == ["a/a-red-circle-uber-b-5.png", "a/a-red-circle-uber-b-6.png"]
    second = vivace(tmp_path, *command, "--out", "b").stdout.split()
    for first_name, other in zip(first, second, strict=True):
        assert (tmp_path / first_name).read_bytes() == (tmp_path / other).read_bytes()
    assert (tmp_path / first[0]).read_bytes() != (tmp_path / first[1]).read_bytes()
    with Image.open(tmp_path / first[1]) as picture:
        assert picture.size == (128, 128)
        text = picture.text  # type: ignore[attr-defined]
    assert text["model"] == "tiny-sd"
    assert text["recipe"] == "tiny_vae+steps(1)"
    assert text["prompt"] == "A red circle, \u00fcber & <b>"
    assert text["seed"] == "6"
    # The second image of seed 5 is the first image of seed 6: images are generated one by one.
    alone = vivace(tmp_path, *command[:-4], "--seed", "6", "--out", "c").stdout.strip()
    assert (tmp_path / alone).read_bytes() == (tmp_path / first[1]).read_bytes()


@pytest.mark.parametrize("prompt", ["", "\U0001f642 \u0642\u0637\u0629", "red " * 1000])
def test_any_prompt_generates_an_image(tmp_path: Path, prompt: str) -> None:
    done = vivace(tmp_path, "generate", prompt, "--recipe", "steps(1)")
    assert (tmp_path / done.stdout.strip()).is_file()
    assert len(done.stderr) < 400
    assert ("ignores the rest" in done.stderr) == (len(prompt) > 100)


def test_generate_never_overwrites_another_image(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "x-0.png").write_bytes(b"mine")
    out = vivace(tmp_path, "generate", "x", "--recipe", "steps(1)").stdout.strip()
    assert out == "pictures/x-0-2.png"
    assert (tmp_path / "pictures" / "x-0.png").read_bytes() == b"mine"
    again = vivace(tmp_path, "generate", "x", "--recipe", "steps(1)").stdout.strip()
    assert again == out, "the same bytes are not written twice"


def test_bench_prints_every_field_of_every_trial(tmp_path: Path) -> None:
    recipes = ["--recipe", "baseline", "--recipe", "tiny_vae", "--recipe", "attention(cudnn)"]
    done = vivace(tmp_path, "bench", *recipes, *QUICK, "--repeats", "3", "--format", "json", code=4)
    rows = json.loads(done.stdout)
    assert [row["recipe"] for row in rows] == ["baseline", "tiny_vae", "attention(cudnn)"]
    for row in rows[:2]:
        latency = row["latency"]
        assert row["outcome"] == "measured"
        assert row["reason"] is None
        assert latency["n"] == 3 == sum(map(len, latency["samples_s"]))
        assert latency["min_s"] <= latency["median_s"] <= latency["max_s"]
        assert latency["min_s"] <= latency["mean_s"] <= latency["max_s"]
        assert latency["ci95_s"][0] <= latency["median_s"] <= latency["ci95_s"][1]
        assert latency["p90_s"] is None, "three samples have no p90"
        assert set(row["stages"]) == {"text", "steps", "vae", "other"}
        assert sum(row["stages"].values()) <= latency["max_s"] * 1.05
        assert row["num_denoiser_calls"] == 2
        assert (
            0 < row["memory"]["weights_bytes"] < row["memory"]["model_bytes"] <= row["memory"]["peak_bytes"]
        )
        assert row["first_call_s"] > 0
        assert row["load_s"] > 0
        assert row["environment"]["num_threads"] == 1
        assert len(row["pictures"]) == 6
    assert rows[1]["fidelity"]["num_pictures"] == 6
    assert 5 < rows[1]["fidelity"]["worst_psnr_db"] <= rows[1]["fidelity"]["psnr_db"]["mean"] < 80
    assert rows[0]["fidelity"]["num_identical"] == 6
    assert rows[0]["quality"]["noise_floor"]["fidelity"]["ssim"]["mean"] > 0.99
    assert rows[1]["quality"]["verdict"] == "unclear"
    assert "CLIP margin kept" in rows[1]["quality"]["reason"]
    assert rows[1]["fidelity"]["clip_kept"]["mean"] > 0.95
    assert all(f["alone"]["sharpness"] > 0 for row in rows[:2] for f in row["figures"])
    assert "quality pass: 6 images generated for the noise floor, " in done.stderr
    assert rows[0]["speedup"] is None
    assert rows[1]["speedup"]["ratio"] > 0
    assert rows[1]["speedup"]["ci95"][0] <= rows[1]["speedup"]["ratio"] <= rows[1]["speedup"]["ci95"][1]
    assert (
        rows[1]["effects"]["tiny_vae@vae"]["vae.parameters"]
        < rows[1]["effects"]["tiny_vae@vae"]["vae.parameters_before"]
    )
    assert rows[2]["outcome"] == "unsupported"
    assert "CPU" in rows[2]["reason"]
    assert rows[2]["latency"] is None

    again = vivace(tmp_path, "bench", *recipes, *QUICK, "--repeats", "3", "--format", "csv", code=4)
    assert "tiny-sd: 3 rounds, 3 already measured" in again.stderr
    assert "quality pass" not in again.stderr, "quality figures are kept too"
    table = list(csv.DictReader(io.StringIO(again.stdout)))
    assert [r["recipe"] for r in table] == [r["recipe"] for r in rows]
    assert float(table[0]["median_s"]) == rows[0]["latency"]["median_s"], "nothing was measured again"

    text = vivace(tmp_path, "bench", *recipes, *QUICK, "--repeats", "3", code=4)
    assert "unsupported" in text.stdout
    assert "reproduce: vivace bench" in text.stderr
    markdown = vivace(tmp_path, "bench", *recipes, *QUICK, "--repeats", "3", "--format", "md", code=4).stdout
    assert len([line for line in markdown.splitlines() if line.startswith("| ")]) == 5
    other = ["--no-quality", "--store", "s2", "--format", "json"]
    (plain,) = json.loads(vivace(tmp_path, "bench", *recipes[2:4], *QUICK, *other).stdout)
    assert plain["fidelity"] is None

    page = vivace(tmp_path, "report", "-o", "page.html", "--title", "Of one's own").stdout.strip()
    html = (tmp_path / page).read_text()
    assert "<title>Of one&#39;s own · vivace</title>" in html
    assert "attention(cudnn)" in html
    assert "data:image/png;base64," in html
    assert "http://" not in html.replace("http://www.w3.org", "")
    files = dict(re.findall(r'download="([^"]*)" href="data:[^,"]*,([^"]*)"', html))
    files = {Path(name).suffix: base64.b64decode(content).decode() for name, content in files.items()}
    assert files[".csv"] == again.stdout
    assert json.loads(files[".json"]) == json.loads(done.stdout)


@pytest.mark.long
def test_an_interrupted_bench_keeps_its_rounds(tmp_path: Path) -> None:
    recipes = ["--recipe", "baseline", "--recipe", "steps(3)", "--recipe", "steps(4)"]
    command = [*VIVACE, "bench", *recipes, *QUICK, "--no-quality"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        # A test run in the background passes an ignored SIGINT on to its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    assert process.stdout is not None
    for line in process.stderr:
        if line.startswith("[1/3]"):
            break
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=30) == 130
    assert "finished rounds are kept" in rest
    assert "Traceback" not in rest
    done = vivace(tmp_path, *command[len(VIVACE) :])
    assert "already measured" in done.stderr


def test_listings_as_json(tmp_path: Path) -> None:
    models = {m["name"]: m for m in json.loads(vivace(tmp_path, "models", "--json").stdout)}
    assert models["tiny-sd"]["bytes"] < 20_000_000
    assert models["sdxl"]["origin"]["repo"] == "stabilityai/stable-diffusion-xl-base-1.0"
    techniques = {t["name"]: t for t in json.loads(vivace(tmp_path, "techniques", "--json").stdout)}
    assert techniques["compile"]["knobs"][0]["name"] == "mode"
    reasons = {s["recipe"]: s["unsupported"] for t in techniques.values() for s in t["here"]}
    assert reasons["attention(math)"] is None
    assert "compile(blocks=repeated)" in reasons, "every value of every knob has its state"
    numbers = {s["recipe"]: (s["weights"], s["products"]) for t in techniques.values() for s in t["here"]}
    assert numbers["quantize(int8)"] == ("in int8, a scale per output row", "as before")
    assert numbers["quantize(nf4, backend=bitsandbytes)"][1] == "as before", "every scheme of every library"
    assert numbers["quantize(int8, backend=bitsandbytes)"][1].startswith("in int8")
    doctor = json.loads(vivace(tmp_path, "doctor", "--device", "cpu", "--json").stdout)
    assert set(doctor["dtype_ms"]) == {"fp32", "bf16", "fp16"}
    assert doctor["environment"]["device"] == "cpu"
    assert doctor["compiled_code"] == os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert any(s["unsupported"] and "CPU" in s["unsupported"] for s in doctor["techniques"])
    by_recipe = {s["recipe"]: (s["rests_on"], s["records_of"]) for s in doctor["techniques"]}
    assert by_recipe["steps(8)"] == ("measured by vivace", "CPU")
    assert by_recipe["quantize(nvfp4)"] == ("no record", "")
    assert by_recipe["tf32"] == ("refused", "")


@pytest.mark.long
def test_doctor_measures_the_limits_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def doctor(*options: str) -> subprocess.CompletedProcess[str]:
        return vivace(tmp_path, "doctor", "--device", "cpu", "--threads", "1", *options)

    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path / "cache"))
    assert "`vivace doctor --device cpu --threads 1 --measure` measures them once" in doctor().stdout
    first = doctor("--measure", "--time-limit", "1", "--json")
    limits = json.loads(first.stdout)["limits"]
    assert {"copy"} <= {c["operation"] for c in limits["ceilings"]}
    again = doctor("--measure")
    assert "kept in" in first.stderr
    assert "kept in" not in again.stderr
    assert f"measured {limits['measured_at']}" in again.stdout
    assert "measures them once" not in again.stdout
    assert "--rerun goes with --measure" in vivace(tmp_path, "doctor", "--rerun", code=2).stderr


def test_techniques_lists_what_runs_here_and_why_others_do_not(tmp_path: Path) -> None:
    text = vivace(tmp_path, "techniques", "--device", "cpu").stdout
    assert "runs here: attention(math), attention(flash)" in text
    assert "not here: attention(sage): there is no sage attention kernel for CPUs" in text
    assert "not here: compile(reduce-overhead): reduce-overhead captures CUDA graphs" in text


def test_a_technique_is_explained(tmp_path: Path) -> None:
    text = vivace(tmp_path, "techniques", "fa2").stdout
    assert "Why:" in text
    assert "attention(flash)" in text
    text = vivace(tmp_path, "techniques", "layerwise_casting").stdout
    assert "layerwise_casting (weights in fp8 (e4m3), without scales): runs here" in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_under_standard_output(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*VIVACE, "models"], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr


def test_quality_compares_two_folders_and_names_broken_images(tmp_path: Path) -> None:
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        for k in range(3):
            grey = 60 * k if folder == "a" else 60 * k + 5
            picture = Image.new("RGB", (32, 32), (grey, grey, grey))
            picture.paste((250, 40, 40), (8, 8, 20, 20))
            if folder == "c" and k == 1:
                picture = Image.new("RGB", (32, 32))
            picture.save(tmp_path / folder / f"{k}.png")
    fine = vivace(tmp_path, "quality", "a", "b")
    assert "psnr_db" in fine.stdout
    assert "3 pairs" in fine.stdout
    ruined = vivace(tmp_path, "quality", "a", "c", code=1)
    assert "B 1.png: black" in ruined.stdout
    rows = json.loads(vivace(tmp_path, "quality", "a", "a", "--json").stdout)
    assert rows["summary"]["psnr_db"]["identical"] == 3
    vivace(tmp_path, "quality", "a", "b", "--prompts", "p.txt", code=2)


def scenes_in(folder: Path, shift: int = 0, gray: bool = False, lost: int = 0) -> None:
    """Eight images of coloured squares, some of which show another one."""
    folder.mkdir()
    for k in range(8):
        picture = Image.new("RGB", (128, 128), (250, 250, 250))
        colour = SQUARES[(k + 3) % 8 if k < lost else k][1]
        picture.paste(colour, (40 + shift, 40, 80 + shift, 80))
        (picture.convert("L") if gray else picture).save(folder / f"{k}.png")


SQUARES = (
    ("red", (222, 38, 38)), ("green", (24, 165, 62)), ("blue", (36, 84, 222)), ("yellow", (250, 214, 30)),
    ("purple", (132, 48, 178)), ("orange", (244, 128, 22)), ("pink", (250, 110, 180)), ("cyan", (30, 196, 214)),
)  # fmt: skip


def test_quality_gives_the_gates_verdict(tmp_path: Path) -> None:
    scenes_in(tmp_path / "a")
    scenes_in(tmp_path / "shifted", shift=1)
    scenes_in(tmp_path / "gray", gray=True)
    scenes_in(tmp_path / "lost", lost=7)
    prompts = "".join(f"a large {colour} square in the center\n" for colour, _ in SQUARES)
    (tmp_path / "prompts.txt").write_text(prompts)
    by_prompts = ("--prompts", "prompts.txt", "--scorer", "tiny-clip")
    fine = vivace(tmp_path, "quality", "a", "shifted", *by_prompts, "--same-picture")
    assert "quality passed: CLIP margin kept 100." in fine.stdout
    assert "match 100.0 %" in fine.stdout
    for folder in ("gray", "lost"):
        ruined = json.loads(vivace(tmp_path, "quality", "a", folder, *by_prompts, "--json", code=1).stdout)
        assert ruined["quality"]["verdict"] == "failed"
        assert "CLIP margin kept" in ruined["quality"]["reason"]
        assert ruined["quality"]["limits"]["clip"] == 0.985
        assert ruined["fidelity"]["num_prompts"] == 8
    gray = vivace(tmp_path, "quality", "a", "gray", "--same-picture", code=1)
    assert "quality failed: match" in gray.stdout
    lenient = vivace(tmp_path, "quality", "a", "gray", *by_prompts, "--min-quality", "clip=0.01,variety=off")
    assert "quality passed" in lenient.stdout
    unknown = vivace(tmp_path, "quality", "a", "shifted")
    assert "quality unclear: nothing says what the images should show" in unknown.stdout
    vivace(tmp_path, "quality", "a", "a", "--witness", "org/blip", code=2)
    for name in ("6.png", "7.png", "5.png"):
        (tmp_path / "shifted" / name).unlink()
    few = vivace(tmp_path, "quality", "a", "shifted", "--same-picture")
    assert "a verdict needs 6 prompts or more, here are 5" in few.stdout
