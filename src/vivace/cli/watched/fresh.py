"""Run a part of a command in a fresh process.

    python -m vivace.cli.commands PART FILE ARGUMENTS...

A fresh process goes through the same command line. It prints nothing until its part begins, skips the earlier parts,
which other processes ran, runs its own, and exits. It makes FILE when the model is read.
"""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from vivace.cli.watched.failures import status_of

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    import click

_ARGUMENTS, _PART, _NUM_PARTS = "arguments", "part", "num_parts"


@dataclass
class CommandPart:
    """The part of a command that this process runs. Parts are numbered from 1 in order."""

    number: int
    is_read: Path
    _streams: tuple[TextIO, TextIO] | None = field(default=None, init=False)

    def keep_silent(self) -> None:
        """Hold back all output until the part begins."""
        self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()

    def begin(self) -> None:
        """Print from now on; drop the held output, which the parent process has printed already."""
        if self._streams is not None:
            sys.stdout, sys.stderr = self._streams
            self._streams = None

    def end(self) -> None:
        """Print the held output if the part never began: it says why."""
        if self._streams is not None:
            kept = sys.stdout, sys.stderr
            self.begin()
            for stream, text in zip((sys.stdout, sys.stderr), kept, strict=True):
                stream.write(text.getvalue() if isinstance(text, io.StringIO) else "")


def settings_of(arguments: list[str], part: CommandPart | None = None) -> dict[str, Any]:
    """Return the object of a command's context: what `run_part` needs, and whether --debug was given."""
    return {"debug": False, _ARGUMENTS: arguments, _PART: part, _NUM_PARTS: 0}


def has_command_line(context: click.Context | None) -> bool:
    """Whether a command was typed, which a fresh process can go through again."""
    return context is not None and bool(context.obj) and _ARGUMENTS in context.obj


def run_part(
    context: click.Context,
    command: Callable[[Callable[[], None]], int],
    watch: Callable[[subprocess.Popen[bytes], Path], int],
) -> int:
    """Run the next part of a command in a fresh process, or here if this is that process; return its exit code."""
    settings = context.obj
    settings[_NUM_PARTS] += 1
    part: CommandPart | None = settings[_PART]
    if part is None:
        return _started(settings[_NUM_PARTS], settings[_ARGUMENTS], watch)
    if settings[_NUM_PARTS] < part.number:
        return 0
    import click

    part.begin()
    status = status_of(lambda: command(part.is_read.touch), debug=lambda: settings["debug"])
    raise click.exceptions.Exit(status)


def _started(number: int, arguments: list[str], watch: Callable[[subprocess.Popen[bytes], Path], int]) -> int:
    import tempfile

    from vivace.foundation.processes.launcher import start_attached
    from vivace.foundation.untrusted.streams import standard_output

    with tempfile.TemporaryDirectory(prefix="vivace-") as folder:
        is_read = Path(folder) / "read"
        command = [
            sys.executable,
            "-m",
            "vivace.cli.commands",
            str(number),
            str(is_read),
            *arguments,
        ]
        sys.stdout.flush()
        sys.stderr.flush()
        return watch(start_attached(command, standard_output()), is_read)
