"""Invalid input: one clear message with a suggestion, exit code 2 or 3, and no file changed."""

from pathlib import Path

import pytest

from tests.typed import typed


@pytest.fixture(autouse=True)
def _in_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n  \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x01")
    (tmp_path / "not-a-model").mkdir()
    (tmp_path / "broken-model").mkdir()
    (tmp_path / "broken-model" / "model_index.json").write_text("{")
    (tmp_path / "code-model").mkdir()
    (tmp_path / "code-model" / "model_index.json").write_text('{"_class_name": ["pipe.py", "Evil"]}')
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("...")
    (tmp_path / "file").write_text("x")
    (tmp_path / "weights.safetensors").write_bytes(b"")


BENCH = ("bench", "--recipe", "baseline")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("bench", "--model", "tiny-ds", "--recipe", "baseline"), 2, "did you mean 'tiny-sd'"),
        (("generate", "x", "--model", "sxdl"), 2, "did you mean 'sdxl'"),
        (("export", "tiny-sd", "--recipe", "baseline"), 2, "takes the model as an option: --model NAME"),
        (("generate", "x", "--model", "org/model"), 3, "HF_HUB_OFFLINE forbids the network"),
        (("generate", "x", "--model", "org/model@../x"), 2, "no model 'org/model@../x'"),
        (("generate", "x", "--model", "not-a-model"), 3, "has no model_index.json"),
        (("generate", "x", "--model", "broken-model"), 3, "is not a diffusers pipeline's index"),
        (("generate", "x", "--model", "code-model"), 3, "runs no code from models"),
        (("generate", "x", "--model", "file"), 3, "is not a .safetensors or .gguf file"),
        (("generate", "x", "--model", "weights.safetensors"), 3, "weights.safetensors is empty"),
        (("generate", "x", "--model", "a\0b"), 2, "no model"),
        (("generate", "x", "--model", "m" * 5000), 2, "no model"),
        (("bench", "--recipe", "tiny_vea"), 2, "did you mean 'tiny_vae'"),
        (("bench", "--recipe", "steps(0)"), 2, "at least 1"),
        (("bench", "--recipe", "bf16+fp16"), 2, "keep one"),
        (
            ("bench", "--recipe", "baseline", "--recipe", "offload(group)+compile"),
            2,
            " " * 17 + "^" * 7 + "\n",
        ),
        (("generate", "x", "--recipe", "cuda_graph+compile(reduce-overhead)"), 2, "keep one of the two"),
        (("bench", "--recipe", "compile(mod=default)"), 2, "did you mean 'mode'"),
        (("bench", "--recipe", "bf16@denoisr"), 2, "did you mean 'denoiser'"),
        (("bench",), 2, "Missing option '--recipe'"),
        ((*BENCH, "--prompts", "nowhere.txt"), 2, "nowhere.txt: No such file"),
        ((*BENCH, "--prompts", "empty.txt"), 2, "no prompt in it"),
        ((*BENCH, "--prompts", "binary.txt"), 2, "not UTF-8"),
        ((*BENCH, "--prompts", "."), 2, "it is a folder, not a regular file"),
        ((*BENCH, "--height", "100"), 2, "the nearest is 96"),
        ((*BENCH, "--width", "10000"), 2, "the nearest is 512"),
        ((*BENCH, "--repeats", "many"), 2, "is not 'auto' or a whole number"),
        ((*BENCH, "--rounds", "0"), 2, "--rounds"),
        ((*BENCH, "--format", "xml"), 2, "json"),
        ((*BENCH, "--store", "file"), 3, "is a file"),
        ((*BENCH, "--store", "foreign"), 3, "not a vivace store"),
        ((*BENCH, "--device", "cuda", "--store", "s"), 3, "--device cpu"),
        (("report", "--store", "nowhere"), 3, "no store at nowhere"),
        (("techniques", "compil"), 2, "did you mean 'compile'"),
        (("generate",), 2, "Missing argument 'PROMPT'"),
        (("generate", "x", "--num-images", "0"), 2, "--num-images"),
        (("generate", "x", "--out", "file"), 3, "--out file is a file"),
        (
            ("generate", "x", "--out", "file/below", "--recipe", "steps:1"),
            3,
            "cannot be written: file is a file, not a folder",
        ),
        (("genrate", "x"), 2, "No such command 'genrate'"),
    ],
    ids=lambda value: " ".join(map(str, value))[:60] if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_clear_message(
    arguments: tuple[str, ...],
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert typed(monkeypatch, *arguments) == code
    out, err = capfd.readouterr()
    assert says in err
    assert "Traceback" not in err
    assert out == ""
    assert {p: p.read_bytes() for p in before} == before
