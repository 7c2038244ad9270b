"""What a process has open: how many files it may have, and folders that it has locked."""

from __future__ import annotations

import os
from pathlib import Path

from vivace.foundation.processes.system import is_posix


def allow_open_files(most: int) -> int | None:
    """Let this process have so many files open, or as many as the system allows; return how many, None for any."""
    if not is_posix():
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    if soft < most:
        soft = most if hard == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def lock_folder(folder: Path) -> int | None:
    """Lock a folder until the returned file descriptor is closed; None where the system has no such locks.

    Raises:
        OSError: another process has locked it, or it is no folder.
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
