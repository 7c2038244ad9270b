"""What this system offers for processes, and replacements for what it lacks."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

NO_FORK = "VIVACE_NO_FORK"
"""The environment variable that disables POSIX calls, so that other systems can be tried."""


def is_without_fork() -> bool:
    """Return whether VIVACE_NO_FORK is set, to anything but 0."""
    return os.environ.get(NO_FORK, "") not in ("", "0")


def is_posix() -> bool:
    """Whether POSIX calls may be used: fork, process groups, `select` on pipes."""
    return os.name == "posix" and not is_without_fork()


def is_linux() -> bool:
    """Whether Linux-only calls may be used: prctl."""
    return is_posix() and sys.platform.startswith("linux")


def can_fork() -> bool:
    """Whether this system forks processes."""
    return is_posix() and hasattr(os, "fork")


def limitations() -> list[str]:
    """Describe what this system lacks and the consequences for commands; empty on Linux."""
    lacks = []
    if not can_fork():
        why = f"{NO_FORK} is set" if is_without_fork() else "this system cannot fork"
        lacks.append(f"{why}: each round starts a fresh process, which takes seconds")
    if not is_linux():
        lacks.append("the processes of a command that is killed end a moment later")
    if not sys.platform.startswith("linux"):
        lacks.append("the peak of memory on a CPU includes loading the model")
    return lacks


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


_OWN = Path("/proc/self")  # of Linux


def reset_resident_peak() -> None:
    """Reset the peak. Only Linux can, and only with permission; elsewhere the peak counts from the start."""
    with contextlib.suppress(OSError):
        (_OWN / "clear_refs").write_text("5", encoding="utf-8")


def peak_resident_bytes() -> int:
    """Return the peak of this process's resident set, in bytes."""
    with contextlib.suppress(OSError):
        for line in (_OWN / "status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if os.name == "posix":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    import psutil

    return int(psutil.Process().memory_info().peak_wset)
