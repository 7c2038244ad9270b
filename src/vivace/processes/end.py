"""End a process, and say how it ended.

A status is the exit code of a process, or minus the signal that ended it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess


def kill_group(pid: int) -> None:
    """Kill a process with those that it started. That it has ended already is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def wait_or_kill(process: subprocess.Popen[bytes], grace_s: float) -> int:
    """Wait for the end of a process, kill it after `grace_s` seconds, and return its status."""
    try:
        return process.wait(timeout=grace_s)
    except subprocess.TimeoutExpired:
        kill_group(process.pid)
        return process.wait()


def ended_by(status: int) -> str | None:
    """Return the name of the signal of a status, e.g. "SIGKILL"; None if the process exited by itself."""
    return signal.Signals(-status).name if status < 0 else None
