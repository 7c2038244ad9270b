"""vivace models --export: a folder, the code that loads it, and one message for each error."""

import json
from pathlib import Path

import pytest

from tests.typed import typed
from vivace import architectures
from vivace.models import CATALOGUE, Embedded, find, find_model


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    return typed(monkeypatch, "models", *arguments)


@pytest.fixture(autouse=True)
def _in_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_prints_what_it_wrote_and_how_to_use_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--export", "Tiny-SD", "new/model") == 0
    out, err = capfd.readouterr()
    assert out.splitlines() == [
        "wrote new/model: tiny-sd, 13 files, 14.9 MB",
        "",
        "With diffusers alone:",
        "",
        "    from diffusers import DiffusionPipeline",
        "    pipe = DiffusionPipeline.from_pretrained('new/model')",
        "    pipe('a red circle above a blue square', height=128, width=128, num_inference_steps=25, "
        "guidance_scale=4).images[0].save('picture.png')",
    ]
    assert err == ""
    assert find_model("new/model").files.keys() >= find_model("tiny-sd").files.keys()


def test_as_json(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--export", "tiny-sd", "out", "--json") == 0
    done = json.loads(capfd.readouterr().out)
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
    arguments: tuple[str, ...],
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    Path("full").mkdir()
    Path("full/file").write_text("mine")
    assert run(monkeypatch, "--export", *arguments) == code
    out, err = capfd.readouterr()
    assert says in err
    assert "Traceback" not in err
    assert out == ""
    assert [path.name for path in Path().rglob("*")] == ["full", "file"]
    assert Path("full/file").read_text() == "mine"


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A limit on the file size fails like a full disk: in the middle of a file."""
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        code = run(monkeypatch, "--export", "tiny-sd", "new/model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert code == 3
    assert "new/model cannot be written: File too large; partial files were removed" in capfd.readouterr().err
    assert not list(Path().iterdir())


def test_listed_sizes_are_of_whole_models(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    index = json.dumps({"_class_name": "FluxPipeline", "unet": ["diffusers", "A"], "vae": ["diffusers", "B"]})
    for name, size in (
        ("flux/unet/a", 3_000_000),
        ("flux/vae/b", 500_000 - len(index)),
        ("fast/unet/a", 1_000_000),
    ):
        (weights / name).parent.mkdir(parents=True, exist_ok=True)
        (weights / name).write_bytes(bytes(size))
    (weights / "flux/model_index.json").write_text(index)
    sd = CATALOGUE["tiny-sd"]
    monkeypatch.setattr(find, "WEIGHTS", weights)
    origins = {"flux": Embedded(folder="flux"), "fast": Embedded(folder="fast", base="flux")}
    entries = {
        name: sd.model_copy(update={"name": name, "origin": where, "few_steps": ()})
        for name, where in origins.items()
    }
    monkeypatch.setattr(architectures, "CATALOGUE", entries)
    monkeypatch.setattr(find, "CATALOGUE", entries)
    assert run(monkeypatch) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[2] == "    3.50 MB shipped with vivace"
    assert lines[5] == "    1.50 MB shipped with vivace, shared in part with flux"
    assert run(monkeypatch, "--json") == 0
    assert [row["bytes"] for row in json.loads(capfd.readouterr().out)] == [3_500_000, 1_500_000]
