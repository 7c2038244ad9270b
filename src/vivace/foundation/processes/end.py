"""End a process, and say how it ended.

A status is the exit code of a process, or minus the signal that ended it. On Windows it is the exit code always.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence

from vivace.foundation.processes.system import is_posix

_FIRST_EXCEPTION = 0xC0000000
_LOOK_EVERY_S = 0.1


def kill(pid: int) -> None:
    """Kill a process, and without POSIX also its descendants. A process that has already ended is not an error."""
    if is_posix():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    else:
        _kill_tree(pid)


def kill_group(pid: int) -> None:
    """Kill a process and its group. A process that has already ended is not an error."""
    if is_posix():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    kill(pid)


def _kill_tree(pid: int) -> None:
    """Kill a process and its descendants, where there are no process groups."""
    import psutil

    try:
        process = psutil.Process(pid)
        tree = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for each in tree:
        with contextlib.suppress(psutil.Error):
            each.kill()


def wait_or_kill(process: subprocess.Popen[bytes], grace_s: float) -> int:
    """Wait for the end of a process, kill it after `grace_s` seconds, and return its status."""
    try:
        return process.wait(timeout=grace_s)
    except subprocess.TimeoutExpired:
        kill_group(process.pid)
        return process.wait()


def ended_by(status: int) -> str | None:
    """Return the name of the signal of a status, e.g. "SIGKILL"; None if the process exited by itself.

    Of a process that Windows ended it is the number of the exception, e.g. "0xC0000005".
    """
    if status >= _FIRST_EXCEPTION:
        return f"0x{status:08X}"
    return signal.Signals(-status).name if status < 0 else None


def wait_for_an_end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Sleep until one of the processes has ended. With POSIX that is when it closes its end of a pipe."""
    if not is_posix():
        while all(process.poll() is None for process in processes):
            time.sleep(_LOOK_EVERY_S)
        return
    poll = select.poll()
    for process in processes:
        if process.stdout is not None and not process.stdout.closed:
            poll.register(process.stdout.fileno(), 0)
    poll.poll()
