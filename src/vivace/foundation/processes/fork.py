"""Run a function in a forked child of this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def fork_child(work: Callable[[], int], *, failed: int = 1) -> int:
    """Fork a child that does `work` and exits with its return value as status; return the child's id.

    Args:
        failed: the child's status if `work` raises. Nothing is printed then.
    """
    _flush()
    pid = os.fork()
    if pid:
        return pid
    status = failed
    try:
        status = work()
    finally:
        try:
            _flush()
        finally:
            os._exit(status)


def status_of_child(pid: int) -> int:
    """Wait for a child and return its status: its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_each_child(call: Callable[[], object]) -> None:
    """Register a function for every child forked from now on, by any caller. Does nothing where nobody can fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
