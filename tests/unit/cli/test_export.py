"""vivace export: a script in a file or on the terminal, and one message for each error."""

import importlib.util
from pathlib import Path

import pytest

from tests.typed import typed


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    return typed(monkeypatch, "export", *arguments)


@pytest.fixture(autouse=True)
def _in_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_file(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--recipe", "steps:5", "--prompt", "a star", "--seed", "7"]
    arguments += ["--height", "64", "--threads", "2"]
    assert run(monkeypatch, *arguments, "--device", "cpu", "-o", "new/draw.py") == 0
    out, err = capfd.readouterr()
    assert out == "wrote new/draw.py; `python new/draw.py` writes picture.png\n"
    assert err == "loading tiny-sd\n"
    text = Path("new/draw.py").read_text()
    compile(text, "draw.py", "exec")
    assert "\nRecipe: steps(5)\nWritten by vivace 0." in text
    assert "torch.set_num_threads(2)" in text
    for argument in ('"a star"', "num_inference_steps=5", "height=64", "width=128", "manual_seed(7)"):
        assert argument in text


@pytest.mark.parametrize("installed", [True, False])
def test_it_says_that_a_lora_needs_a_library(
    installed: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lora = Path(__file__).parents[3] / "tinyworld" / "loras" / "tiny-sd-outlines.safetensors"
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: (installed or None) if name == "peft" else original(name, *a),
    )
    assert run(monkeypatch, "--recipe", f"lora('{lora}')", "--device", "cpu", "-o", "lora.py") == 0
    assert ("pip install peft" in capfd.readouterr().err) is not installed
    assert run(monkeypatch, "--device", "cpu", "-o", "plain.py") == 0
    assert "peft" not in capfd.readouterr().err


def test_on_the_terminal(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--recipe", "cfg_cutoff:0.4+fp32", "--device", "cpu") == 0
    out, err = capfd.readouterr()
    compile(out, "draw.py", "exec")
    assert "note: dtype: every targeted component is fp32 already\n" in err
    assert "note: the script imports vivace, because no other library has cfg_cutoff(0.4)\n" in err


def test_a_file_is_overwritten_only_with_force(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("draw.py").write_text("mine")
    assert run(monkeypatch, "-o", "draw.py", "--device", "cpu") == 3
    out, err = capfd.readouterr()
    assert err == (
        "vivace: draw.py exists and was not changed; give another name, or --force to overwrite it\n"
    ), "reported before the model is loaded"
    assert out == ""
    assert Path("draw.py").read_text() == "mine"
    assert run(monkeypatch, "-o", "draw.py", "--device", "cpu", "--force") == 0
    assert Path("draw.py").read_text().startswith('"""Generate an image with tiny-sd.')


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--model", "tiny-ds"), 2, "no model 'tiny-ds'; did you mean 'tiny-sd'?"),
        (
            ("--model", "synthetic:flux-dev"),
            2,
            "random weights, which only vivace makes; export flux-dev",
        ),
        (("--recipe", "steps:0"), 2, "steps must be a whole number, at least 1"),
        (("--recipe", "tf32", "--device", "cpu"), 3, "tf32: TF32 is a mode of NVIDIA's tensor cores"),
        (("--recipe", "fp32", "--device", "cpu"), 3, "dtype: every targeted component is fp32 already"),
        (("--height", "100"), 2, "--height 100: tiny-sd takes multiples of 32"),
        (("-o", "/proc/nowhere/draw.py", "--device", "cpu"), 3, "/proc/nowhere/draw.py cannot be written"),
        (("-o", ".", "--force", "--device", "cpu"), 3, "cannot be written"),
    ],
)
def test_a_wrong_export_is_one_clear_message(
    arguments: tuple[str, ...],
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *arguments) == code
    out, err = capfd.readouterr()
    assert says in err
    assert "Traceback" not in err
    assert out == ""
    assert not list(Path().iterdir())
