"""On a full disk an error names what the user asked for, and nothing is left behind."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from tests.typed import run_vivace
from vivace.benchmark.store.images import save_image
from vivace.errors import OutputError
from vivace.machinery.quantization import calibration
from vivace.machinery.step_caching import model_fits
from vivace.models.export_embedded import export

FULL = "No space left on device"


def fail(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, FULL, "/somewhere/.vivace-abc.part/x")


def fail_as_safetensors_does(*_: Any, **__: Any) -> None:
    raise SafetensorError(f"Error while serializing: I/O error: {FULL} (os error 28)")


@pytest.mark.parametrize(
    ("place", "failure"),
    [("safetensors.torch.save_file", fail_as_safetensors_does), ("pathlib.Path.write_text", fail)],
)
def test_save_names_the_folder(
    place: str, failure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, failure)
    done = run_vivace(
        tmp_path, "save", "tiny-sd", "mine", "--recipe", "bf16", "--device", "cpu", "--store", "none", code=3
    )
    assert "mine cannot be written: " in done.stderr
    assert FULL in done.stderr
    assert ".part" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_export_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.copyfile", fail)
    with pytest.raises(OutputError, match=f"mine cannot be written: {FULL}") as caught:
        export("tiny-sd", tmp_path / "mine")
    assert ".part" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_small_files_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(os, "chmod", fail)
    monkeypatch.setattr(model_fits, "_file", lambda *_: tmp_path / "fit.json")
    monkeypatch.setattr(model_fits, "_architecture", lambda *_: "")
    for write in (
        lambda: save_image(tmp_path / "pictures", b"png"),
        lambda: model_fits.keep(model_fits.Ratios((1.0,), "m"), None),
    ):
        with pytest.raises(OutputError, match=FULL) as caught:
            write()
        assert ".part" not in str(caught.value)
    assert calibration.write_cache(tmp_path / "scales.safetensors", b"x") is False
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
