"""vivace models --export: a folder, the code that loads it, and one message for each error."""

import json
from pathlib import Path

import pytest

from tests.typed import Run
from vivace.models import find_model


def test_it_prints_what_it_wrote_and_how_to_use_it(run: Run) -> None:
    done = run("models", "--export", "Tiny-SD", "new/model")
    assert done.stdout.splitlines() == [
        "wrote new/model: tiny-sd, 13 files, 14.9 MB",
        "",
        "With diffusers alone:",
        "",
        "    from diffusers import DiffusionPipeline",
        "    pipe = DiffusionPipeline.from_pretrained('new/model')",
        "    pipe('a red circle above a blue square', height=128, width=128, num_inference_steps=25, "
        "guidance_scale=4).images[0].save('picture.png')",
    ]
    assert done.stderr == ""
    assert find_model("new/model").files.keys() >= find_model("tiny-sd").files.keys()


def test_as_json(run: Run) -> None:
    done = json.loads(run("models", "--export", "tiny-sd", "out", "--json").stdout)
    assert done["folder"] == "out"
    assert done["files"] == len([path for path in Path("out").rglob("*") if path.is_file()])
    assert done["python"][0] == "from diffusers import DiffusionPipeline"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("tiny-ds", "out"), 2, "no model 'tiny-ds' ships with vivace; did you mean 'tiny-sd'?"),
        (("tiny-sd", "full"), 3, "full is not empty, and nothing in it was changed; give a new folder"),
        (("tiny-sd", "full/file"), 3, "full/file is not a folder; give the name of a new one"),
        (("tiny-sd", "/proc/nowhere/out"), 3, "/proc/nowhere/out cannot be written"),
        (("tiny-sd", "m" * 300), 3, "cannot be written: File name too long"),
        (("tiny-sd",), 2, "requires 2 arguments"),
    ],
)
def test_a_wrong_model_export_is_one_clear_message(
    run: Run, arguments: tuple[str, ...], code: int, says: str
) -> None:
    Path("full").mkdir()
    Path("full/file").write_text("mine")
    done = run("models", "--export", *arguments, code=code)
    assert says in done.stderr
    assert done.stdout == ""
    assert [path.name for path in Path().rglob("*")] == ["full", "file"]
    assert Path("full/file").read_text() == "mine"


def test_a_full_disk(run: Run) -> None:
    """A limit on the file size fails like a full disk: in the middle of a file."""
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        done = run("models", "--export", "tiny-sd", "new/model", code=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "new/model cannot be written: File too large; partial files were removed" in done.stderr
    assert not list(Path().iterdir())
