"""Run a command in a separate process that is watched while it reads a foreign model.

A child reads the model and goes on with the command; this process watches it until the model is read, and reports the
reason if it has to be ended.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from vivace.cli.watched.failures import INTERRUPTED, OWN_FAULT, status_of
from vivace.cli.watched.fresh import has_command_line, run_part
from vivace.errors import UnusableModel
from vivace.foundation.processes.launcher import LOOK_EVERY_S, ended_by, kill
from vivace.foundation.processes.resident import fork_child, status_of_child
from vivace.foundation.processes.system import can_fork
from vivace.models.find import WEIGHTS
from vivace.models.model_files import num_bytes
from vivace.models.reading_limits import ReadingLimits, complaint, is_trusted

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from vivace.models.find import LocatedModel
    from vivace.models.scorers import LocatedScorer

_CTRL_C = ("SIGINT", "0xC000013A")  # the second on Windows
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
    """Run the rest of a command, which reads models that score images; see `guarded`. Models that ship with vivace are
    read in this process."""
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
    """Run the rest of a command in a watched process; see `guarded`.

    Where no process can be forked it is a fresh one, and without a command line to go through again it is this one.
    """
    context = click.get_current_context(silent=True)
    if can_fork():
        return _in_child(context, name, limits, command)
    if context is None or not has_command_line(context):
        return command(lambda: None)
    return run_part(
        context,
        command,
        lambda process, is_read: _ended(
            process.pid, process.wait, lambda: _is_over(process, is_read), name, limits
        ),
    )


def _in_child(context: click.Context | None, name: str, limits: ReadingLimits, command: Command) -> int:
    """Run the rest of a command in a forked child."""
    until_read, is_read = os.pipe()

    def run() -> int:
        os.close(until_read)
        return status_of(
            lambda: command(_Once(is_read)),
            debug=lambda: context is not None and bool((context.obj or {}).get("debug")),
        )

    pid = fork_child(run, failed=OWN_FAULT)
    os.close(is_read)
    try:
        return _ended(
            pid,
            lambda: status_of_child(pid),
            # It closes the other end when the model is read, or when it ends.
            lambda: bool(select.select([until_read], [], [], LOOK_EVERY_S)[0]),
            name,
            limits,
        )
    finally:
        os.close(until_read)


class _Once:
    """Close a file the first time it is called."""

    def __init__(self, file: int) -> None:
        self._file: int | None = file

    def __call__(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _is_over(process: subprocess.Popen[bytes], is_read: Path) -> bool:
    """Wait a little; return whether the model is read or the process has ended."""
    time.sleep(LOOK_EVERY_S)
    return is_read.exists() or process.poll() is not None


def _ended(
    pid: int, wait: Callable[[], int], is_over: Callable[[], bool], name: str, limits: ReadingLimits
) -> int:
    """Watch a process until reading is over, wait for its end, and return its exit code.

    Args:
        wait: waits for the process and returns its status.
        is_over: waits a little, and returns whether the model is read or the process has ended.
    """
    # The process gets Ctrl-C as well, and says so.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        started = time.monotonic()
        while not is_over():
            if (excess := limits.excess(pid, time.monotonic() - started)) is not None:
                kill(pid)
                wait()
                raise UnusableModel(complaint(name, excess))
        status = wait()
    finally:
        signal.signal(signal.SIGINT, before)
    by = ended_by(status)
    if by in _CTRL_C:  # before it could say so
        click.echo("\nvivace: interrupted", err=True)
        return INTERRUPTED
    if by is not None:
        raise UnusableModel(f"{name} ended the process that used it ({by}); it is damaged, or memory ran out")
    return status
