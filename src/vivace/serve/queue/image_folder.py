"""The folder through which a server and its workers exchange pixels: in memory where the system has such a place.

A server that is killed cannot remove its folder, so the next one does. A folder in use is locked by its server, and the
system releases the lock when that process ends, however it does: unlike the number of a process, a lock holds across
containers that share the memory, and is not mistaken after the number is used again or the clock was set.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from vivace.foundation.processes.system import is_posix, lock_folder

LOG = logging.getLogger("vivace.serve")
_MEMORY = Path("/dev/shm")
_PREFIX = "vivace-images-"
_NEW = ".vivace-new-"
"""The prefix of a folder without a lock, which nobody may remove."""


class ImageFolder:
    """A folder of one server.

    Args:
        parent: of it; None for memory, or the system's folder for temporary files where there is none.

    Attributes:
        path: of the folder.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or (_MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir()))
        remove_abandoned(parent)
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
        self._lock = lock_folder(new)
        is_locked = self._lock is not None
        self.path = new.rename(parent / f"{_PREFIX}{new.name.removeprefix(_NEW)}") if is_locked else new

    def cleanup(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_images(folder: Path, jobs: Iterable[str]) -> None:
    """Remove what is left of jobs that have ended: their worker may have died, or written a part."""
    for job in jobs:
        for file in folder.glob(f"{job}-*"):
            file.unlink(missing_ok=True)


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of this user's servers that have ended without doing so. Only POSIX has the locks."""
    if not is_posix():
        return
    for folder in sorted(parent.glob(f"{_PREFIX}*")):
        with _held(folder) as is_abandoned:
            if is_abandoned:
                num_bytes = sum(file.stat().st_size for file in folder.glob("*") if file.is_file())
                shutil.rmtree(folder, ignore_errors=True)
                LOG.info("%s is removed: its server ended without doing so (%d bytes)", folder, num_bytes)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Lock a folder of this user for a while; yield False if another process has it, or it is none."""
    try:
        is_own = not folder.is_symlink() and folder.is_dir() and folder.stat().st_uid == os.getuid()
        lock = lock_folder(folder) if is_own else None
    except OSError:  # it is locked, or was removed meanwhile
        lock = None
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)
