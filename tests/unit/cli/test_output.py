"""Files are written atomically."""

import errno
import os
from pathlib import Path

import pytest

from vivace.cli.output import replace, write_new
from vivace.errors import OutputError


def test_a_new_file_never_replaces_an_old_one(tmp_path: Path) -> None:
    assert write_new(tmp_path / "a" / "x.png", b"one")
    assert not write_new(tmp_path / "a" / "x.png", b"two")
    assert (tmp_path / "a" / "x.png").read_bytes() == b"one"
    replace(tmp_path / "a" / "x.png", b"three")
    assert (tmp_path / "a" / "x.png").read_bytes() == b"three"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["x.png"]


def test_a_full_disk_leaves_the_old_file_and_no_partial_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page.html").write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "chmod", full)
    for write in (write_new, replace):
        with pytest.raises(OutputError, match=r"page\.html cannot be written: No space left"):
            write(tmp_path / "page.html", b"new")
    monkeypatch.undo()
    assert (tmp_path / "page.html").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
