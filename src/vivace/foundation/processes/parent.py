"""End this process with the one that started it, so that a killed command leaves nothing running."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading

from vivace.foundation.processes.system import is_linux, is_posix

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have Linux kill this process when its parent dies; elsewhere a thread notices and ends it."""
    if is_linux():
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()


def is_abandoned() -> bool:
    """Return whether the parent died before `die_with_parent`: the other end of the request pipe is closed."""
    if not is_posix():
        return False  # it then reads no request, and ends
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN)
    return any(event & select.POLLHUP and not event & select.POLLIN for _, event in poll.poll(0))


def end_with_pipe(number: int) -> None:
    """End this process when the other end of a pipe is closed, even with unread data. Called in a thread."""
    if is_posix():
        poll = select.poll()
        poll.register(number, 0)
        poll.poll()
        os._exit(1)
    _end_after(os.getppid())


def _end_after(parent: int) -> None:
    """Wait for the end of a process, and end this one."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(parent).wait()
    os._exit(1)
