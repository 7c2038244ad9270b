"""vivace export: a script in a file or on the terminal, and one message for each error."""

import importlib.util
from pathlib import Path

import pytest

from tests.typed import Run


def test_a_file(run: Run) -> None:
    arguments = ["--recipe", "steps:5", "--prompt", "a star", "--seed", "7"]
    arguments += ["--height", "64", "--threads", "2"]
    done = run("export", *arguments, "--device", "cpu", "-o", "new/draw.py")
    assert done.stdout == "wrote new/draw.py; `python new/draw.py` writes picture.png\n"
    assert done.stderr == "loading tiny-sd\n"
    text = Path("new/draw.py").read_text()
    compile(text, "draw.py", "exec")
    assert "\nRecipe: steps(5)\nWritten by vivace 0." in text
    assert "torch.set_num_threads(2)" in text
    for argument in ('"a star"', "num_inference_steps=5", "height=64", "width=128", "manual_seed(7)"):
        assert argument in text


@pytest.mark.parametrize("installed", [True, False])
def test_it_says_that_a_lora_needs_a_library(
    run: Run, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = Path(__file__).parents[3] / "tinyworld" / "loras" / "tiny-sd-outlines.safetensors"
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: (installed or None) if name == "peft" else original(name, *a),
    )
    done = run("export", "--recipe", f"lora('{lora}')", "--device", "cpu", "-o", "lora.py")
    assert ("pip install peft" in done.stderr) is not installed
    assert "peft" not in run("export", "--device", "cpu", "-o", "plain.py").stderr


def test_on_the_terminal(run: Run) -> None:
    done = run("export", "--recipe", "cfg_cutoff:0.4+fp32", "--device", "cpu")
    compile(done.stdout, "draw.py", "exec")
    assert "note: dtype: every targeted component is fp32 already\n" in done.stderr
    assert "note: the script imports vivace, because no other library has cfg_cutoff(0.4)\n" in done.stderr


def test_a_file_is_overwritten_only_with_force(run: Run) -> None:
    Path("draw.py").write_text("mine")
    done = run("export", "-o", "draw.py", "--device", "cpu", code=3)
    assert "draw.py exists and was not changed" in done.stderr
    assert "loading" not in done.stderr
    assert done.stdout == ""
    assert Path("draw.py").read_text() == "mine"
    run("export", "-o", "draw.py", "--device", "cpu", "--force")
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
    run: Run, arguments: tuple[str, ...], code: int, says: str
) -> None:
    done = run("export", *arguments, code=code)
    assert says in done.stderr
    assert done.stdout == ""
    assert not list(Path().iterdir())
