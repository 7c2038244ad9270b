"""Embedded models written as folders for plain diffusers: whole or not at all, never over anything."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderTiny, DiffusionPipeline
from PIL import Image

import vivace
from vivace.errors import OutputError, UnknownModel, UnusableModel
from vivace.models import find, find_model
from vivace.models.export_embedded import Exported, export

NAMES = ["tiny-flux", "tiny-flux-schnell"]


def same_weights(pipe: Any, other: Any) -> bool:
    """Bit for bit, component by component."""
    modules = {name for name, part in other.components.items() if isinstance(part, torch.nn.Module)}
    assert modules >= {"vae", "text_encoder"}
    for name in modules:
        ours, theirs = getattr(pipe, name).state_dict(), getattr(other, name).state_dict()
        if ours.keys() != theirs.keys() or not all(torch.equal(ours[key], theirs[key]) for key in ours):
            return False
    return True


def run(done: Exported, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, np.ndarray]:
    """What a user sees who pastes the printed lines: the pipeline, and the saved image."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"DiffusionPipeline": DiffusionPipeline}
    load, draw = done.python
    exec(load, names)  # noqa: S102
    names["pipe"].set_progress_bar_config(disable=True)
    torch.manual_seed(0)
    exec(draw, names)  # noqa: S102
    with Image.open(folder / "picture.png") as picture:
        return names["pipe"], np.asarray(picture)


def with_vivace(name: str) -> tuple[Any, np.ndarray]:
    session = vivace.load(name, device="cpu")
    prompt = "a red circle above a blue square"
    return session.pipe, np.asarray(session(prompt, generator=torch.Generator().manual_seed(0)).images[0])


def test_tiny_sd_draws_the_same_without_vivace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, picture = run(export("Tiny-SD ", tmp_path / "my 'model'"), tmp_path, monkeypatch)
    expected, drawn = with_vivace("tiny-sd")
    assert pipe.dtype == torch.float32
    assert same_weights(pipe, expected)
    assert np.array_equal(picture, drawn)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick("tiny-flux")
def test_a_model_of_two_folders_becomes_one(
    flux_family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    done = export(name, tmp_path / "out")
    pipe, picture = run(done, tmp_path, monkeypatch)
    expected, drawn = with_vivace(name)
    assert same_weights(pipe, expected)
    assert np.array_equal(picture, drawn)
    other, _ = with_vivace(next(n for n in NAMES if n != name))
    assert not same_weights(pipe, other)
    sizes = [path.stat().st_size for path in done.folder.rglob("*") if path.is_file()]
    assert (done.num_files, done.num_bytes) == (len(sizes), sum(sizes))


def test_the_tiny_vae_is_exported_too(tmp_path: Path) -> None:
    folder = export("tiny-sd", tmp_path / "out").folder
    call = {"prompt": "a red circle above a blue square", "num_inference_steps": 2, "guidance_scale": 4.0}
    drawn = []
    for name in ("tiny-sd", str(folder)):
        session = vivace.load(name, "tiny_vae", device="cpu")
        assert isinstance(session.pipe.vae, AutoencoderTiny)
        drawn.append(np.asarray(session(**call, generator=torch.Generator().manual_seed(0)).images[0]))
    assert np.array_equal(*drawn)
    (folder / "tiny_vae" / "config.json").write_text('{"_class_name": "AutoencoderTiny", "in_channels": 1e9}')
    with pytest.raises(UnusableModel, match=r"tiny_vae/config.json.*in_channels"):
        find_model(str(folder))


@pytest.mark.parametrize("name", NAMES)
def test_vivace_takes_the_folder_for_the_same_model(flux_family: Path, tmp_path: Path, name: str) -> None:
    located, again = find_model(name), find_model(str(export(name, tmp_path / "out").folder))
    assert {name: path.read_bytes() for name, path in located.files.items()} == {
        name: path.read_bytes()
        for name, path in again.files.items()
        if not name.startswith("tiny_vae/") and name != "vivace.json"
    }
    assert again.defaults == located.defaults
    assert again.call == located.call == {"max_sequence_length": 32}
    assert (again.defaults["height"], again.defaults["width"]) == (128, 128)


@pytest.mark.parametrize("is_there", [False, True])
def test_everybody_may_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    weights = tmp_path / "weights"
    for name in ("tiny-sd", "tiny-sd-tiny-vae"):
        shutil.copytree(find.WEIGHTS / name, weights / name)
    for path in weights.rglob("*.safetensors"):
        path.chmod(0o600)
    monkeypatch.setattr(find, "WEIGHTS", weights)
    folder = tmp_path / "new" / "out"
    if is_there:
        folder.mkdir(parents=True)
    before = os.umask(0o022)
    try:
        export("tiny-sd", folder)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o644}
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_dir()} == {0o755}
    assert folder.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in folder.parent.iterdir()] == ["out"]


def test_an_empty_folder_is_filled_where_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    export("tiny-sd", Path("."))
    assert find_model(".").files.keys() >= find_model("tiny-sd").files.keys(), "seen from within"
    assert not [path.name for path in Path(".").iterdir() if path.name.startswith(".")]


def failing(error: BaseException, after: int) -> Any:
    """A shutil.copyfile that copies so many files and then fails, leaving half a file."""
    copied = []

    def copy(source: Path, target: Path) -> None:
        if len(copied) == after:
            target.write_bytes(source.read_bytes()[:10])
            raise error
        target.write_bytes(source.read_bytes())
        copied.append(target)

    return copy


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), OutputError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_an_interrupted_export_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    raised: type[BaseException],
    is_there: bool,
) -> None:
    folder = tmp_path / "new" / "out"
    if is_there:
        folder.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(shutil, "copyfile", failing(error, after=3))
    with pytest.raises(raised) as caught:
        export("tiny-sd", folder)
    assert sorted(tmp_path.rglob("*")) == before
    if raised is OutputError:
        assert "out cannot be written: No space left on device; partial files were removed" in str(
            caught.value
        )
        assert "14.9 MB" in str(caught.value)


def test_nothing_is_ever_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("...")
    (tmp_path / "file").write_text("...")
    with pytest.raises(OutputError, match="full is not empty, and nothing in it was changed"):
        export("tiny-sd", tmp_path / "full")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OutputError, match="file is not a folder; give the name of a new one"):
            export("tiny-sd", folder)
    # Another program makes the folder while the model is being copied.
    copy = shutil.copyfile

    def slow(source: Path, target: Path) -> None:
        (tmp_path / "late").mkdir(exist_ok=True)
        (tmp_path / "late" / "thesis.tex").write_text("...")
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", slow)
    with pytest.raises(OutputError, match="late cannot be written: Directory not empty"):
        export("tiny-sd", tmp_path / "late")
    files = {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"thesis.tex": "...", "file": "..."}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "late"]


@pytest.mark.parametrize("name", ["tiny-ds", ".", "tiny-sd-tiny-vae"])
def test_only_what_ships_with_vivace_is_exported(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        UnknownModel, match="ships with vivace; did you mean 'tiny-sd'" if name != "." else "no"
    ):
        export(name, tmp_path / "out")
    assert not list(tmp_path.iterdir())
