"""Only regular files of bounded size are read, and what libraries raise about them becomes one error."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from vivace.errors import UnusableModel, UsageError
from vivace.foundation.untrusted.files import (
    is_below,
    open_plain,
    parse_json,
    read_bytes,
    read_text,
    reading,
    user_path,
)
from vivace.foundation.untrusted.image_files import open_image
from vivace.models.checkpoints.gguf_file import read_gguf_header


def _socket(path: Path) -> None:
    os.chdir(path.parent)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (os.mkfifo, "a named pipe"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
        (Path.mkdir, "a folder"),
        (_socket, "No such device"),
        (lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 10**12), "at most 100 are read"),
        (lambda path: path.symlink_to(path), "symbolic links"),
        (lambda path: path.symlink_to("/proc/self/environ"), "more than 100 bytes"),
    ],
    ids=["pipe", "device", "folder", "socket", "huge", "loop", "size unknown"],
)
def test_what_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LONG", "x" * 200)
    path = tmp_path / "x"
    make(path)
    with pytest.raises(UsageError, match=says), reading(path, UsageError):
        read_bytes(path, 100)


def test_files_are_closed_again(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(ValueError, match="a folder"):
            open_plain(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_text(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbfa\xc3\xa9")
    assert read_text(tmp_path / "x", 100) == "aé"
    (tmp_path / "x").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_text(tmp_path / "x", 100)


@pytest.mark.parametrize(
    "text", ["[" * 65 + "]" * 65, "[" * 10**6, '{"a":' * 900 + "1" + "}" * 900, "9" * 41, "{", "\x00"]
)
def test_json_with_limits(text: str) -> None:
    with pytest.raises(ValueError, match=r"nest deeper than 64|41 digits|is not JSON"):
        parse_json(text)


def test_json_within_the_limits() -> None:
    assert parse_json('{"a": 1, "a": [-Infinity, 1000000000000000019884624838656]}')["a"][1] == int(1e30)
    with pytest.raises(ValueError, match="the key 'a' twice"):
        parse_json('{"a": 1, "a": 2}', unique=True)


def test_paths_inside_a_folder(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0"
    for folder in (snapshot, tmp_path / "models--a--b" / "blobs", tmp_path / "own"):
        folder.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/f")
    (tmp_path / "own" / "config.json").symlink_to("../models--a--b/blobs/f")
    assert is_below(snapshot / "config.json", snapshot), "as the hub's cache is made"
    assert not is_below(tmp_path / "own" / "config.json", tmp_path / "own")
    assert not is_below(snapshot / ".." / ".." / ".." / "x", snapshot)


def test_a_path_of_a_user_that_does_not_exist() -> None:
    assert user_path("~nobody-here/x") == Path("~nobody-here/x")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (KeyError("layers"), "x cannot be read: KeyError: 'layers'; try y"),
        (ValueError("first\n  last \n\n"), "x cannot be read: last; try y"),
        (RuntimeError(), "x cannot be read: RuntimeError; try y"),
        (RecursionError("maximum"), "x cannot be read: it nests too deeply; try y"),
        (type("PanicException", (BaseException,), {})("overflow"), "x cannot be read: overflow; try y"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_failure_becomes_one_error(error: BaseException, says: str) -> None:
    with pytest.raises(UnusableModel) as caught, reading("x", advice="try y"):
        raise error
    assert str(caught.value) == says
    assert caught.value.__cause__ is error, "--debug prints it"


@pytest.mark.parametrize(
    "error", [MemoryError(), KeyboardInterrupt(), UsageError("own"), RuntimeError("CUDA out of memory")]
)
def test_what_is_not_the_files_fault_stays(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, reading("x"):
        raise error
    assert caught.value is error


@pytest.mark.timeout(20)
def test_pictures_have_limits(tmp_path: Path) -> None:
    Image.new("1", (13_000, 13_000)).save(tmp_path / "large.png")
    (tmp_path / "script.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    os.mkfifo(tmp_path / "pipe.png")
    for name, says in (
        ("large.png", "13000x13000 pixels; at most"),
        ("script.png", "none of PNG"),
        ("pipe.png", "a named pipe"),
    ):
        with pytest.raises(UsageError, match=says):
            open_image(tmp_path / name)
    with pytest.raises(UnusableModel, match="a named pipe"):
        read_gguf_header(tmp_path / "pipe.png")
