"""Write files atomically."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from vivace.errors import OutputError


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
