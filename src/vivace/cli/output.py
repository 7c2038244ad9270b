"""Write files atomically."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from vivace.errors import OutputError
from vivace.foreign.reading import reason


def write_new(path: Path, content: bytes) -> bool:
    """Write a new file; return False, without writing, if the path exists.

    Raises:
        OutputError: it cannot be written. No partial file is left.
    """
    with _temporary(path, content) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    return True


def replace(path: Path, content: bytes) -> None:
    """Write a file, replacing an existing one.

    Raises:
        OutputError: it cannot be written. An existing file is unchanged.
    """
    with _temporary(path, content) as temporary:
        os.replace(temporary, path)


def check_writable(folder: Path, output: Path | None = None) -> None:
    """Raise OutputError unless files can be written into a folder. Nothing is left behind.

    Called before work whose result would be lost.

    Args:
        output: the file that is going to be written, for the message.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".", suffix=".part")
        os.close(handle)
        os.unlink(name)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte
        raise OutputError(
            f"{output or folder} cannot be written: {reason(error)}; give another name"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            for path in made:
                path.rmdir()


@contextlib.contextmanager
def _temporary(path: Path, content: bytes) -> Iterator[str]:
    """Yield a temporary file with the content, beside `path`; it is removed at the end unless it was moved."""
    name = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # mkstemp's files are private; images and pages are not
        yield name
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(name)
