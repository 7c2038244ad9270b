"""Files are asked for while libraries are imported."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from vivace.models.reading_limits import read_ahead


def test_whole_files_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[tuple[int, int]] = []
    monkeypatch.setattr(
        os,
        "posix_fadvise",
        lambda number, offset, length, advice: requests.append((offset, length)),
        raising=False,
    )
    monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", 3, raising=False)
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file, size in zip(files, (1 << 25, 5), strict=True):
        with file.open("wb") as opened:
            opened.truncate(size)
    thread = read_ahead(files)
    assert thread is not None
    thread.join(10)
    assert requests == [(0, 1 << 24), (1 << 24, 1 << 24), (0, 1 << 24)]
    assert read_ahead([tmp_path / "missing"]) is None
    assert read_ahead([]) is None
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 25))
    assert read_ahead(files) is None, "they would fill the memory"
