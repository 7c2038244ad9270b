"""Read a model that somebody else made in a process of its own, with limits on time and memory.

vivace checks configurations and headers before a library sees them, but cannot foresee everything that libraries do
with them: loop, allocate, or abort the process. A child reads the model and goes on with the command; this process
watches it until the model is read, and says what happened if it has to be ended.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import click

from vivace.cli.failures import OWN_FAULT, status_of
from vivace.errors import UnusableModel
from vivace.models.files import num_bytes
from vivace.models.find import Found

_LOOK_EVERY_S = 0.1
_LEAST_S = 120.0  # importing the libraries takes up to 20 s on a busy machine
_BYTES_PER_S = 20e6  # of a slow disk
_LEAST_BYTES = 6e9  # libraries, and the host's part of CUDA
_COPIES = 6  # of the weights: the file's pages, fp16 as fp32, and what conversions need for a moment


@dataclass(frozen=True)
class Limits:
    """Limits until a model is read."""

    seconds: float
    num_bytes: float

    @classmethod
    def of(cls, found: Found) -> Limits:
        size = num_bytes({path.name: path for path in found.weights if path.is_file()})
        return cls(_LEAST_S + size / _BYTES_PER_S, _LEAST_BYTES + _COPIES * size)


def guarded(
    found: Found | None, command: Callable[[Callable[[], None]], int], limits: Limits | None = None
) -> int:
    """Run the rest of a command, which reads a model, and return its exit code.

    Models of the catalogue are read in this process.

    Args:
        found: the model; None for an architecture of vivace's own.
        command: is given a function to call when the model is read; from then on there are no limits.

    Raises:
        UnusableModel: the model took more time or memory than its size explains, or ended the process.
    """
    if found is None or is_trusted(found) or not hasattr(os, "fork"):
        return command(lambda: None)
    context = click.get_current_context(silent=True)
    limits = limits or Limits.of(found)
    _flush()
    until_read, is_read = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = OWN_FAULT
        try:
            os.close(until_read)
            status = status_of(
                lambda: command(_Once(is_read)),
                debug=lambda: context is not None and bool((context.obj or {}).get("debug")),
            )
        finally:
            _flush()
            os._exit(status)
    os.close(is_read)
    # The child gets Ctrl-C as well, and says so.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return _watched(pid, until_read, found.model.name, limits)
    finally:
        signal.signal(signal.SIGINT, before)
        os.close(until_read)


def is_trusted(found: Found) -> bool:
    """Whether the model's configuration is vivace's own, or pinned in the catalogue."""
    return found.entry is not None and found.model.source != "file"


class _Once:
    """Close a file the first time it is called."""

    def __init__(self, file: int) -> None:
        self._file: int | None = file

    def __call__(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _watched(pid: int, until_read: int, name: str, limits: Limits) -> int:
    """Wait for a child, and return its exit code. It closes the other end of `until_read` when the model is read."""
    import psutil

    started = time.monotonic()
    process = psutil.Process(pid)
    is_read = False
    while not is_read:
        is_read = bool(select.select([until_read], [], [], _LOOK_EVERY_S)[0])
        try:
            held = 0 if is_read else process.memory_info().rss
        except psutil.Error:
            continue
        too_long = time.monotonic() - started > limits.seconds
        if not is_read and (too_long or held > limits.num_bytes):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            what = f"{limits.seconds:.0f} s" if too_long else f"{limits.num_bytes / 1e9:.1f} GB of memory"
            raise UnusableModel(
                f"{name} took more than {what} to read, which its size does not explain; check its configuration files"
            )
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status < 0:
        ended_by = signal.Signals(-status).name
        raise UnusableModel(
            f"{name} ended the process that used it ({ended_by}); it is damaged, or memory ran out"
        )
    return status


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
