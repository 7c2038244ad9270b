"""A worker process: reads requests as lines on standard input, writes events as lines of JSON on standard output.

    python -m MODULE --fork              prepares once, then forks one child per request
    python -m MODULE --fork --try-gpu    the same, unless a forked child cannot use the GPU
    python -m MODULE                     serves its requests itself

A forked child starts in milliseconds and shares the imported libraries, which take seconds to import.

Events: {"event": "ready", "forks": true|false}, {"event": "started", "pid": ...}, the request's own events,
        {"event": "ended", "status": ...}: the exit code, or minus the signal that ended the child
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TextIO, TypeVar

from vivace.foundation.processes.protocol import send_event
from vivace.foundation.processes.system import can_fork, is_linux, is_posix

RequestT = TypeVar("RequestT")
_PR_SET_PDEATHSIG = 1


def serve_requests(
    parse: Callable[[str], RequestT],
    serve: Callable[[RequestT, TextIO], None],
    prepare: Callable[[], None],
    gpu_works_in_a_child: Callable[[], bool],
) -> None:
    """Serve requests as the arguments of this process say, until its input ends.

    Args:
        parse: turns a line into a request.
        serve: computes the answer and writes it to the events.
        prepare: what all requests need, done once: imports.
        gpu_works_in_a_child: tried if the arguments have --try-gpu; if it does not, no child is forked.
    """
    die_with_parent()
    if is_abandoned():
        return
    events = open_events()
    prepare()
    forks = "--fork" in sys.argv[1:] and can_fork()
    if forks and "--try-gpu" in sys.argv[1:]:
        forks = gpu_works_in_a_child()
    send_event(events, {"event": "ready", "forks": forks})
    for line in sys.stdin:
        request = parse(line)
        if forks:
            _serve_in_child(request, serve, events)
        else:
            send_event(events, {"event": "started", "pid": os.getpid()})
            serve(request, events)
            send_event(events, {"event": "ended", "status": 0})


def open_events() -> TextIO:
    """Return where this worker writes its events.

    Standard output carries events only: what libraries print goes to standard error from now on. Ctrl-C is ignored,
    since the process that started this one ends it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    events = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    return events


def print_to(log: str) -> None:
    """Redirect the output of this process to a file from now on."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _serve_in_child(request: RequestT, serve: Callable[[RequestT, TextIO], None], events: TextIO) -> None:
    """Fork a child that serves the request, wait for it, and send its status."""

    def work() -> int:
        os.setpgid(0, 0)  # so that its compile workers can be killed with it
        die_with_parent()
        try:
            send_event(events, {"event": "started", "pid": os.getpid()})
            serve(request, events)
        except Exception:  # noqa: BLE001  the process boundary
            traceback.print_exc()  # to the log
            return 1
        finally:
            events.flush()
        return 0

    events.flush()
    status = status_of_child(fork_child(work))
    # End the line that a killed child may have left incomplete.
    events.write("\n")
    send_event(events, {"event": "ended", "status": status})


def fork_child(work: Callable[[], int]) -> int:
    """Fork a child that does `work` and exits with its return value as status, or 1 if it raises; return its id."""
    _flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
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
