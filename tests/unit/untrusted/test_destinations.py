"""Files go to where a user wants them, whatever kind of file that is."""

import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.make import make_environment, make_round, make_trial
from tests.typed import run_vivace
from vivace.benchmark import Store
from vivace.errors import OutputError
from vivace.foundation.untrusted.destinations import (
    check_folder,
    check_writable,
    replace,
    would_overwrite,
    write_new,
)

WRITERS: list[Callable[[Path, bytes], object]] = [replace, write_new]


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def refused(monkeypatch: pytest.MonkeyPatch, name: str, number: int, *, times: int = 10**9) -> None:
    """Let a function of `os` fail with an errno, the first `times` times."""
    original, left = getattr(os, name), [times]

    def fails(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            return original(*arguments, **named)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, fails)


def test_a_new_file_never_replaces_an_old_one(tmp_path: Path) -> None:
    assert write_new(tmp_path / "a" / "x.png", b"one")
    assert not write_new(tmp_path / "a" / "x.png", b"two")
    assert (tmp_path / "a" / "x.png").read_bytes() == b"one"
    replace(tmp_path / "a" / "x.png", b"three")
    assert content_of(tmp_path / "a") == {"x.png": b"three"}


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "shown").mkdir()
    link, chain = tmp_path / "page.html", tmp_path / "newest.html"
    link.symlink_to(Path("shown") / "1.html")
    chain.symlink_to(link)
    check_writable(chain)
    assert not would_overwrite(link), "its target does not exist yet"
    assert write_new(link, b"one")
    assert would_overwrite(chain)
    assert not write_new(chain, b"two")
    replace(chain, b"three")
    assert content_of(tmp_path / "shown") == {"1.html": b"three"}
    assert link.is_symlink()
    assert chain.is_symlink()
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OutputError, match="symbolic links"):
        replace(loop, b"x")


@pytest.mark.parametrize("write", WRITERS)
def test_a_reader_of_a_pipe_gets_the_content(write: Callable[[Path, bytes], object], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
    reader.start()
    content = bytes(range(256)) * 1000
    write(pipe, content)
    reader.join(20)
    assert received == [content]
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    check_writable(pipe)  # which must not wait for a reader
    assert not would_overwrite(pipe)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("linked", [False, True])
def test_a_device_is_written_to_and_stays(
    write: Callable[[Path, bytes], object], linked: bool, tmp_path: Path
) -> None:
    master, slave = os.openpty()
    device = Path(os.ttyname(slave))
    path = tmp_path / "link"
    path.symlink_to(device)
    try:
        check_writable(path if linked else device)
        write(path if linked else device, b"content")
        assert os.read(master, 100) == b"content"
        assert stat.S_ISCHR(device.lstat().st_mode)
        assert path.is_symlink()
    finally:
        os.close(master)
        os.close(slave)


def test_standard_output_gets_the_page_and_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in ("-", "/dev/stdout", tmp_path / "link"):
        if path == tmp_path / "link":
            path.symlink_to("/dev/stdout")
        replace(Path(path), b"page")
        assert capfd.readouterr().out == "page"
    assert not Path("-").exists()


@pytest.mark.parametrize("step", ["fsync", "rename"])
@pytest.mark.parametrize("write", WRITERS)
def test_a_full_disk_leaves_the_old_file_and_no_partial_one(
    write: Callable[[Path, bytes], object], step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "page.html", tmp_path / "made" / "by us" / "page.html"
    old.write_bytes(b"old")
    rename = "link" if write is write_new else "replace"
    refused(monkeypatch, rename if step == "rename" else step, errno.ENOSPC)
    for path in (old, new):
        with pytest.raises(OutputError, match=r"page\.html cannot be written: No space left"):
            write(path, b"new")
    assert old.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"], "no partial file, and no folder"


def test_permissions_stay(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_bytes(b"old")
    page.chmod(0o640)
    replace(page, b"new")
    assert stat.S_IMODE(page.stat().st_mode) == 0o640
    mask = os.umask(0o027)
    try:
        replace(tmp_path / "new.html", b"new")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "new.html").stat().st_mode) == 0o640


def test_a_file_that_may_not_be_written_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    page.write_bytes(b"old")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everything
    for write in (lambda: replace(page, b"new"), lambda: check_writable(page)):
        with pytest.raises(OutputError, match="Permission denied"):
            write()
    assert page.read_bytes() == b"old"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("", "it is a folder; give the name of a file"),
        ("file/page.html", "file is a file, not a folder"),
        ("a" * 300, "File name too long"),
        ("a\0b", "null"),
    ],
)
def test_what_is_no_file_is_a_line(path: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    wrong = tmp_path / path
    for write in (
        lambda: check_writable(wrong),
        lambda: replace(wrong, b"x"),
        lambda: write_new(wrong, b"x"),
    ):
        with pytest.raises(OutputError, match=why) as caught:
            write()
        assert "\n" not in str(caught.value)
    assert content_of(tmp_path) == {"file": b"old"}
    with pytest.raises(OutputError):
        check_folder(tmp_path / "file" / "more")
    check_folder(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_command_writes_to_a_pipe_and_through_a_link(tmp_path: Path) -> None:
    with Store.create(tmp_path / ".vivace") as store:
        trials = [make_trial("baseline"), make_trial("tiny_vae")]
        for key in store.add_trials(trials, make_environment()):
            store.append(key, make_round(0))
        store.start_run("vivace bench", trials, make_environment(), None, 1)
    pipe, link = tmp_path / "pipe", tmp_path / "link.html"
    os.mkfifo(pipe)
    link.symlink_to("page.html")
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert run_vivace(tmp_path, "report", "-o", "pipe").stdout == "pipe\n"
    reader.join(20)
    run_vivace(tmp_path, "report", "-o", "link.html")
    assert link.is_symlink()
    (page,) = received
    assert page.startswith(b"<!doctype html>")
    assert (tmp_path / "page.html").read_bytes().startswith(page[:200])
