"""A lock on a folder that ends with its process, where the system has such locks."""

from __future__ import annotations

import os
from pathlib import Path

from vivace.processes.system import is_posix


def lock_folder(folder: Path) -> int | None:
    """Lock a folder until the returned file descriptor is closed; None where the system has no such locks.

    Raises:
        OSError: another process has locked it.
    """
    if not is_posix():
        return None
    import fcntl

    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(number)
        raise
    return number
