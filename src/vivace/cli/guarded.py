"""Run a command in a process of its own that is watched while it reads a model of somebody else.

A child reads the model and goes on with the command; this process watches it until the model is read, and says what
happened if it has to be ended.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from vivace.cli.failures import OWN_FAULT, status_of
from vivace.errors import UnusableModel
from vivace.models.find import WEIGHTS
from vivace.models.model_files import num_bytes
from vivace.models.reading_limits import ReadingLimits, complaint, is_trusted
from vivace.processes.end import ended_by
from vivace.processes.fork import can_fork, fork_child, status_of_child
from vivace.processes.process_limits import LOOK_EVERY_S

if TYPE_CHECKING:
    from vivace.models.find import LocatedModel
    from vivace.models.scorers import LocatedScorer

Command = Callable[[Callable[[], None]], int]


def guarded(located: LocatedModel | None, command: Command) -> int:
    """Run the rest of a command, which reads a model, and return its exit code.

    Models of the catalogue are read in this process.

    Args:
        located: the model; None for an architecture of vivace's own.
        command: is given a function to call when the model is read; from then on there are no limits.

    Raises:
        UnusableModel: the model took more time or memory than its size explains, or ended the process.
    """
    if located is None or is_trusted(located):
        return command(lambda: None)
    return guarded_reading(located.model.name, ReadingLimits.of(located), command)


def guarded_scorers(scorers: Sequence[LocatedScorer], command: Command) -> int:
    """Run the rest of a command, which reads models that score images; see `guarded`. vivace's own are read here."""
    foreign = [scorer for scorer in scorers if scorer.folder.parent != WEIGHTS]
    if not foreign:
        return command(lambda: None)
    size = sum(
        num_bytes({path.name: path for path in scorer.folder.glob("*.safetensors")}) for scorer in foreign
    )
    return guarded_reading(
        " or ".join(scorer.name for scorer in foreign), ReadingLimits.of_bytes(size), command
    )


def guarded_reading(name: str, limits: ReadingLimits, command: Command) -> int:
    """Run the rest of a command in a watched process; see `guarded`. Where no process can be forked, run it here."""
    if not can_fork():
        return command(lambda: None)
    context = click.get_current_context(silent=True)
    until_read, is_read = os.pipe()

    def run() -> int:
        os.close(until_read)
        return status_of(
            lambda: command(_Once(is_read)),
            debug=lambda: context is not None and bool((context.obj or {}).get("debug")),
        )

    pid = fork_child(run, failed=OWN_FAULT)
    os.close(is_read)
    # The child gets Ctrl-C as well, and says so.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return _watched(pid, until_read, name, limits)
    finally:
        signal.signal(signal.SIGINT, before)
        os.close(until_read)


class _Once:
    """Close a file the first time it is called."""

    def __init__(self, file: int) -> None:
        self._file: int | None = file

    def __call__(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _watched(pid: int, until_read: int, name: str, limits: ReadingLimits) -> int:
    """Wait for a child, and return its exit code. It closes the other end of `until_read` when the model is read."""
    started = time.monotonic()
    while not select.select([until_read], [], [], LOOK_EVERY_S)[0]:
        if (excess := limits.excess(pid, time.monotonic() - started)) is not None:
            os.kill(pid, signal.SIGKILL)
            status_of_child(pid)
            raise UnusableModel(complaint(name, excess))
    status = status_of_child(pid)
    if (by := ended_by(status)) is not None:
        raise UnusableModel(f"{name} ended the process that used it ({by}); it is damaged, or memory ran out")
    return status
