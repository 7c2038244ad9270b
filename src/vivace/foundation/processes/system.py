"""What this system offers for processes, and replacements for what it lacks."""

from __future__ import annotations

import os
import sys

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
        lacks.append(f"{why}: each round and each foreign model starts a fresh process, which takes seconds")
    if not is_linux():
        lacks.append("the processes of a command that is killed end a moment later")
    if not sys.platform.startswith("linux"):
        lacks.append("the peak of memory on a CPU includes loading the model")
    return lacks
