"""Write to the paths that users name: regular files atomically, links followed, devices and pipes written to.

A path may name a file that does not exist yet, an existing one, a link to either, a device such as /dev/null, a pipe
such as a shell's >(gzip), or an open file such as /dev/stdout, which `-` also names. Whatever goes wrong, an existing
file keeps its content, nothing half written is left, and the error is one line.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from vivace.errors import OutputError
from vivace.foundation.untrusted.files import reason
from vivace.foundation.untrusted.streams import standard_output

Fill = Callable[[BinaryIO], object]
"""Writes the content into an open file."""
_DESCRIPTOR = re.compile(r"/(?:dev|proc/(?:self|thread-self|\d+))/fd/(\d+)")
_MAX_LINKS = 40
_NO_LINKS = {
    errno.EPERM,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EINVAL,
    errno.EMLINK,
    errno.EXDEV,
}
"""Errors of file systems without hard links: exFAT, FAT, many of FUSE and of networks."""
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_CANNOT_REPLACE = {errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS, errno.EXDEV}
"""Errors of files that may be written, but not replaced: one that is mounted by itself, as into a container, and
one in another user's folder."""


def replace(path: Path, content: bytes) -> None:
    """Write a file, replacing an existing one.

    Raises:
        OutputError: it cannot be written. An existing file is unchanged.
    """
    _write(path, lambda file: file.write(content))


def replace_from(path: Path, source: Path) -> None:
    """Write the content of a file of any size to where a user wants it; see `replace`. The source is kept."""
    with source.open("rb") as content:
        _write(path, lambda file: shutil.copyfileobj(content, file, 1 << 20))


def write_new(path: Path, content: bytes) -> bool:
    """Write a new file; return False, without writing, if a file of that name exists.

    A device or pipe is written to: nothing is lost there.

    Raises:
        OutputError: it cannot be written. No partial file is left.
    """
    return fill_new(path, lambda file: file.write(content))


def fill_new(path: Path, fill: Fill) -> bool:
    """Write a new file whose content `fill` writes; see `write_new`."""
    with _explained(path):
        if _written_as_stream(path, fill):
            return True
        target = Path(os.path.realpath(path))
        with _temporary(target, fill) as temporary:
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return _renamed_to_new(temporary, target)
    return True


def would_overwrite(path: Path) -> bool:
    """Return whether writing to a path would lose a file that exists; not so for devices, pipes and dangling links."""
    return _descriptor(path) is None and os.path.isfile(path)


def is_stream(path: Path) -> bool:
    """Return whether a path names an open file, a device or a pipe, whose name says nothing of its content."""
    return _descriptor(path) is not None or (path.exists() and not path.is_file() and not path.is_dir())


def is_standard_output(path: Path) -> bool:
    """Return whether a path names standard output: `-`, /dev/stdout, or a link to it."""
    return _descriptor(path) == 1


def check_writable(path: Path) -> None:
    """Raise OutputError unless a file can be written. Nothing is left behind.

    Called before work whose result would be lost.
    """
    with _explained(path, "; give another name"):
        if (descriptor := _descriptor(path)) is not None:
            os.fstat(standard_output() if descriptor == 1 else descriptor)
            return
        status = _status(path)
        if status is not None and not stat.S_ISREG(status.st_mode):
            return
        folder = Path(os.path.realpath(path)).parent
        try:
            _try_to_write_in(folder)
        except OSError as error:
            if status is None or error.errno not in _CANNOT_REPLACE:
                raise


def check_folder(folder: Path) -> None:
    """Raise OutputError unless files can be written into a folder, which need not exist. Nothing is left behind."""
    with _explained(folder, "; give another folder"):
        _try_to_write_in(folder)


def _write(path: Path, fill: Fill) -> None:
    with _explained(path):
        if _written_as_stream(path, fill):
            return
        is_there = _status(path) is not None
        target = Path(os.path.realpath(path))
        try:
            with _temporary(target, fill) as temporary:
                os.replace(temporary, target)
        except OSError as error:
            if not is_there or error.errno not in _CANNOT_REPLACE:
                raise
            _overwrite(target, fill)


def _status(path: Path) -> os.stat_result | None:
    """Return what a path names, all links followed; None for a file that does not exist yet.

    Raises:
        OSError: it cannot be written to, whatever its folder allows.
    """
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, "it is a folder; give the name of a file")
    if stat.S_ISBLK(status.st_mode):
        raise OSError(errno.EINVAL, "it is a disk, whose content would be lost")
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return status


def _descriptor(path: Path) -> int | None:
    """Return the number of the open file that a path names, such as 1 of /dev/stdout; None for all other paths."""
    if str(path) == "-":
        return 1
    name = os.path.abspath(path)
    for _ in range(_MAX_LINKS):
        if (match := _DESCRIPTOR.fullmatch(name)) is not None:
            own = name.startswith(("/dev/", "/proc/self/", "/proc/thread-self/", f"/proc/{os.getpid()}/"))
            return int(match[1]) if own else None
        if not os.path.islink(name):
            return None
        name = os.path.normpath(os.path.join(os.path.dirname(name), os.readlink(name)))
    return None


def _written_as_stream(path: Path, fill: Fill) -> bool:
    """Write to an open file, a device or a pipe, if the path names one; else return False."""
    descriptor = _descriptor(path)
    if descriptor is not None:
        handle = os.dup(standard_output() if descriptor == 1 else descriptor)
    else:
        status = _status(path)
        if status is None or stat.S_ISREG(status.st_mode):
            return False
        # Opening a pipe waits for its reader, as a shell does.
        handle = os.open(path, os.O_WRONLY | getattr(os, "O_NOCTTY", 0))
    with os.fdopen(handle, "wb") as file:
        fill(file)
    return True


@contextlib.contextmanager
def _temporary(target: Path, fill: Fill) -> Iterator[Path]:
    """Yield a temporary file with the content, beside `target`; it is removed at the end unless it was moved.

    It has the permissions of an existing target, else those of any new file.
    """
    made = _make(target.parent)
    temporary = target.parent / f".{os.urandom(8).hex()}.part"
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        with os.fdopen(handle, "wb") as file:
            fill(file)
            file.flush()
            _sync(file.fileno())
        _copy_permissions(target, temporary)
        yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        _remove(made)
        raise
    temporary.unlink(missing_ok=True)


def _sync(handle: int) -> None:
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def _copy_permissions(existing: Path, new: Path) -> None:
    try:
        status = os.stat(existing)
    except FileNotFoundError:
        return
    # File systems without permissions refuse both, and only root gives files away.
    with contextlib.suppress(OSError):
        os.chmod(new, stat.S_IMODE(status.st_mode))
    if hasattr(os, "chown"):
        with contextlib.suppress(OSError):
            os.chown(new, status.st_uid, status.st_gid)


def _renamed_to_new(temporary: Path, target: Path) -> bool:
    """Give a temporary file its name where there are no hard links; return False if the name is taken.

    The name is claimed by an empty file first, since renaming would replace another program's file.
    """
    try:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError:
        return False
    try:
        os.replace(temporary, target)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return True


def _overwrite(target: Path, fill: Fill) -> None:
    """Write into an existing file that cannot be replaced; after an error it has its old content."""
    content = io.BytesIO()
    fill(content)
    before = target.read_bytes()
    handle = os.open(target, os.O_WRONLY | getattr(os, "O_BINARY", 0))
    try:
        try:
            _write_all(handle, content.getbuffer())
            os.fsync(handle)
        except BaseException:
            # Its blocks are still there, so that the old content fits on a full disk.
            os.lseek(handle, 0, os.SEEK_SET)
            _write_all(handle, memoryview(before))
            raise
    finally:
        os.close(handle)


def _write_all(handle: int, content: memoryview) -> None:
    rest = content
    while rest:
        rest = rest[os.write(handle, rest) :]
    os.ftruncate(handle, len(content))


def _try_to_write_in(folder: Path) -> None:
    """Write a file into a folder and remove it, and the folders that it needed."""
    made = _make(folder)
    temporary = folder / f".{os.urandom(8).hex()}.part"
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        temporary.unlink()
    finally:
        _remove(made)


def _make(folder: Path) -> list[Path]:
    """Make a folder and those above it; return the new ones, the innermost first."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{path} is a file, not a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        _remove(made)
        raise
    return made


def _remove(folders: list[Path]) -> None:
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


@contextlib.contextmanager
def _explained(path: Path, advice: str = "") -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL byte
        why = error.strerror if isinstance(error, OSError) and error.strerror else reason(error)
        raise OutputError(f"{path} cannot be written: {why}{advice}") from error
