"""`synthetic:NAME` as a model: it is found, loaded, measured and reported, or refused with a reason."""

import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import vivace
from tests.flow_models import MODELS
from tests.narrow import FLOW, SIDE, make_all_small
from tests.typed import typed
from vivace.answers.data import written
from vivace.architectures import ARCHITECTURES
from vivace.benchmark import Store
from vivace.errors import UnknownModel, Unsupported, WorkloadError
from vivace.foundation.spec.record import Outcome, Record
from vivace.models import CATALOGUE, find_model, load_pipeline
from vivace.report.rows import rows_of
from vivace.report.run_answer import answer_of
from vivace.runtime.session import Session
from vivace.runtime.workloads import checked_request

PROMPT = "a red circle above a blue square"
QUICK = ["--repeats", "1", "--rounds", "1", "--warmup", "1", "--device", "cpu", "--no-rivals"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_all_small(monkeypatch)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    return typed(monkeypatch, *arguments)


def load(model: str, recipe: str = "baseline") -> Session:
    return vivace.load(model, recipe, device="cpu")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_model_is_run_as_its_catalogue_entry_says(name: str) -> None:
    located, entry = find_model(f" Synthetic:{name.upper()} "), CATALOGUE[name]
    assert located.model.name == f"synthetic:{name}"
    assert located.model.is_synthetic
    assert located.defaults == {
        "height": entry.height,
        "width": entry.width,
        "num_inference_steps": entry.num_inference_steps,
        "guidance_scale": entry.guidance_scale,
    }
    assert located.call == entry.call
    lengths = {
        "flux-dev": 512,
        "flux-schnell": 256,
        "flux-kontext": 512,
        "sd35-large": 256,
        "z-image-turbo": 512,
        "flux2-dev": 512,
        "krea-2-turbo": 512,
        "krea-2-raw": 512,
    }
    if name in lengths or name not in FLOW:
        assert located.call.get("max_sequence_length") == lengths.get(name)
    assert located.pipeline == ARCHITECTURES[name].pipeline == entry.pipeline
    scheduler = ARCHITECTURES[name].scheduler
    if entry.scheduler is not None:
        assert scheduler.class_name == entry.scheduler.class_name
        assert entry.scheduler.overrides.items() <= scheduler.config.items()
    without = name == "playground" or name.startswith(("sana", "cogview", "ideogram"))
    assert (located.tiny_vae is None) == without, "latents that no tiny VAE decodes"
    workload = checked_request(f"synthetic:{name}", "baseline").workload
    assert (workload.height, workload.num_inference_steps) == (entry.height, entry.num_inference_steps)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("synthetic:flux-dve", "did you mean 'flux-dev'? (synthetic: takes one of sd15, sdxl,"),
        ("synthetic:", "no architecture '' for random weights"),
        ("synthetic:tiny-sd", "tiny-sd ships with its weights"),
        ("synthetic:org/repo", "synthetic: takes one of"),
        ("synthetic:" + "x" * 5000, "synthetic: takes one of"),
        ("sxdl:nothing", "or synthetic:NAME for random weights"),
    ],
)
def test_a_wrong_name_gets_the_right_ones(name: str, says: str) -> None:
    with pytest.raises(UnknownModel) as caught:
        find_model(name)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 900


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("name", "recipe", "scheduler", "spacing"),
    [
        ("sdxl", "baseline", "EulerDiscreteScheduler", "leading"),
        ("sdxl-lightning-2step", "tiny_vae", "EulerDiscreteScheduler", "trailing"),
        ("hyper-sdxl-4step", "bf16@denoiser", "DDIMScheduler", "trailing"),
        ("lcm-sdxl", "baseline", "LCMScheduler", "leading"),
        ("pony", "baseline", "EulerAncestralDiscreteScheduler", "leading"),
        ("flux-schnell", "tiny_vae", "FlowMatchEulerDiscreteScheduler", None),
    ],
)
def test_load_builds_a_model_that_generates(
    name: str, recipe: str, scheduler: str, spacing: str | None
) -> None:
    session = load(f"synthetic:{name}", recipe)
    pipe = session.pipe
    assert type(pipe.scheduler).__name__ == scheduler
    assert pipe.scheduler.config.get("timestep_spacing") == spacing
    for module in (pipe.vae, pipe.text_encoder):
        assert not module.training
        assert {p.dtype for p in module.parameters()} == {torch.float32}, "CPUs run fp32"
        assert not any(p.requires_grad for p in module.parameters())
    if recipe == "tiny_vae":
        assert type(pipe.vae).__name__ == "AutoencoderTiny"
    picture = session(PROMPT, generator=torch.Generator().manual_seed(0), output_type="pt").images
    assert picture.shape == (1, 3, SIDE, SIDE)  # type: ignore[attr-defined]
    assert torch.isfinite(picture).all()


@pytest.mark.usefixtures("small")
def test_two_loads_have_the_same_weights_and_a_gpu_runs_the_catalogue_s_precision() -> None:
    located = find_model("synthetic:sd15")
    first, second = (load_pipeline(located, "cpu") for _ in range(2))
    for key, value in first.unet.state_dict().items():
        assert torch.equal(value, second.unet.state_dict()[key]), key
    # "meta" stands for a GPU: what matters is that the dtype is not the CPU's.
    built: list[Any] = []

    def build(architecture: Any, device: str, dtype: Any) -> Any:
        built.append((architecture.name, device, dtype))
        raise Unsupported("not built here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vivace.models.synthetic.build", build)
        for model in (located, find_model("synthetic:flux-dev")):
            with pytest.raises(Unsupported, match="not built here"):
                load_pipeline(model, "cuda")
    assert built == [("sd15", "cuda", torch.float16), ("flux-dev", "cuda", torch.bfloat16)]


def test_a_model_too_large_for_host_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8_000_000_000))
    with pytest.raises(Unsupported, match=r"flux-dev takes 67\.\d GB on a CPU.* 8\.0 GB are free"):
        load("synthetic:flux-dev")


@pytest.fixture
def benched(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[str, str]:
    """Return what `vivace bench` prints for two recipes: standard output and error."""
    monkeypatch.chdir(tmp_path)
    command = ["bench", "--model", "synthetic:sd15", "--recipe", "baseline", "--recipe", "tiny_vae", *QUICK]
    assert run(monkeypatch, *command) == 0
    done = capfd.readouterr()
    return done.out, done.err


def test_bench_mentions_random_weights_in_every_output(
    benched: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = benched
    assert out.startswith("synthetic:sd15 on ")
    assert "random weights: times and memory are the architecture's" in out
    assert "quality pass" not in err
    assert "plan," not in err, "a CPU's resident set is not predicted"
    with Store.read_only(tmp_path / ".vivace") as store:
        stored = [store.record(key) for key in store.runs()[0].keys]
    all_rows = rows_of([record for record in stored if record is not None])
    outputs = {format_: written(answer_of(all_rows), format_) for format_ in ("json", "csv", "md", "table")}
    rows = json.loads(outputs["json"])
    assert [row["source"] for row in rows] == ["synthetic", "synthetic"]
    assert all("random weights" in row["warnings"][0] for row in rows)
    assert all(row["load_s"] > 0 for row in rows)
    assert not any(row["pictures"] or row["quality"] or row["fidelity"] for row in rows)
    assert [row["recipe"] for row in rows] == ["baseline", "tiny_vae"]
    table = list(csv.DictReader(io.StringIO(outputs["csv"])))
    assert all(row["source"] == "synthetic" and "random weights" in row["warnings"] for row in table)
    assert "random weights" in outputs["md"]
    assert run(monkeypatch, "report") == 0
    page = (tmp_path / "page.html").read_text()
    assert "random weights: times and memory are the architecture" in page
    assert "<img" not in page
    assert not list((tmp_path / ".vivace" / "pictures").rglob("*.png"))


@pytest.mark.parametrize(
    ("name", "says"),
    [("qwen-image", r"guidance\(1, true_cfg=4\)"), ("flux2-klein-4b", "ignores it; leave it out")],
)
def test_a_guidance_scale_that_changes_nothing_is_refused(name: str, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        checked_request(f"synthetic:{name}", "baseline", guidance_scale=3.0)
    assert checked_request(f"synthetic:{name}", "baseline").workload.guidance_scale == 1.0


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.exhaustive("sd35*", "flux2-*", "sana-*")
@pytest.mark.long
def test_each_pipeline_is_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipes = ["--recipe", "baseline", "--recipe", "bf16", "--recipe", "taylorseer(hits=0.5)"]
    command = ["bench", "--model", f"synthetic:{name}", "--num-inference-steps", "3", *recipes, *QUICK]
    assert run(monkeypatch, *command) == 0, capfd.readouterr().err
    out, err = capfd.readouterr()
    assert "ignored" not in out + err, "nothing is passed that its pipeline has no use for"
    with Store.read_only(tmp_path / ".vivace") as store:
        records = [store.record(key) for key in store.runs()[0].keys]
    assert [record.outcome for record in records if record is not None] == [Outcome.MEASURED] * 3
    generate = ["generate", PROMPT, "--model", f"synthetic:{name}", "--device", "cpu", "--num-images", "2"]
    assert run(monkeypatch, *generate) == 0
    assert len(capfd.readouterr().out.split()) == 2


@pytest.mark.usefixtures("small")
@pytest.mark.long
def test_on_random_weights_a_threshold_must_be_a_fixed_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["bench", "--model", "synthetic:flux-dev", "--num-inference-steps", "3", *QUICK]
    command += ["--recipe", "baseline", "--recipe", "fbcache:0.1", "--recipe", "fbcache(hits=0.5)"]
    assert run(monkeypatch, *command) == 4, "some trials failed"
    done = capfd.readouterr()
    output = " ".join(done.out.split())
    assert "with random weights a threshold says nothing" in output
    assert "give a fixed schedule, first_block_cache(hits=0.5)" in output
    with Store.read_only(tmp_path / ".vivace") as store:
        records = [store.record(key) for key in store.runs()[0].keys]
    outcomes = [record.outcome for record in records if record is not None]
    assert outcomes == [Outcome.MEASURED, Outcome.UNSUPPORTED, Outcome.MEASURED]
    assert isinstance(records[2], Record)
    assert records[2].rounds[0].evidence["cache_hit_rate"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "flags", [("--min-quality", "clip=0.9"), ("--scorer", "embedded"), ("--lpips",)], ids=lambda f: f[0]
)
def test_options_about_its_images_are_refused(
    flags: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["bench", "--model", "tiny-sd", "--model", "synthetic:sdxl", "--recipe", "baseline"]
    assert run(monkeypatch, *command, *flags) == 2
    err = capfd.readouterr().err
    assert f"{flags[0]}: synthetic:sdxl has random weights, so its images have no quality to measure" in err
    assert "measure sdxl" in err
    assert not (tmp_path / ".vivace").exists(), "before anything was measured"
