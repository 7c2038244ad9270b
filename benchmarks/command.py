"""What the scripts' commands share: errors are one message and an exit code, as `vivace` has it; and the options of
those that measure recipe after recipe into a record, until the time is over.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from vivace.benchmark import Timing
from vivace.errors import VivaceError

INTERRUPTED = 130
MEASURED_IN_PART = 4


@dataclass(frozen=True)
class Measuring:
    """What the options of `measures` said.

    record: None for the script's own.
    started: by time.monotonic().
    """

    record: Path | None
    store: Path
    limit_s: float | None
    timing: Timing
    device: str
    started: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        """Whether no further recipe may be started."""
        return self.limit_s is not None and time.monotonic() - self.started >= self.limit_s

    def ended(self, following: str) -> int:
        """The exit code where the time is over, with a message that says what comes next."""
        click.echo(f"{self.limit_s:g} s are over; the same command goes on with {following}", err=True)
        return MEASURED_IN_PART


def measures(
    *, record: str, repeats: int, warmup: int, timeout_s: float = 400.0
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorate a command's function with the options of measuring; it is given a `Measuring` as `how`.

    Args:
        record: the script's own, in words.
        repeats, warmup, timeout_s: the defaults; calls, calls, and seconds a recipe.
    """
    options = (
        click.option("--record", type=click.Path(path_type=Path, dir_okay=False), help=f"Default: {record}."),
        click.option("--store", type=click.Path(path_type=Path), default=".vivace", show_default=True),
        click.option(
            "--limit-s", type=click.FloatRange(min=0), help="Start no further recipe after so many seconds."
        ),
        click.option(
            "--repeats", type=click.IntRange(1, 1000), default=repeats, show_default=True, help="Timed calls."
        ),
        click.option(
            "--warmup", type=click.IntRange(1, 100), default=warmup, show_default=True, help="Calls before."
        ),
        click.option(
            "--timeout",
            type=click.FloatRange(min=1),
            default=timeout_s,
            show_default=True,
            help="Seconds a recipe.",
        ),
        click.option(
            "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True
        ),
    )

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(function)
        def told(
            *,
            record: Path | None,
            store: Path,
            limit_s: float | None,
            repeats: int,
            warmup: int,
            timeout: float,
            device: str,
            **others: Any,
        ) -> int:
            timing = Timing(rounds=1, repeats=repeats, max_warmup=warmup, timeout_s=timeout)
            return function(how=Measuring(record, store, limit_s, timing, device), **others)

        for option in reversed(options):
            told = option(told)
        return told

    return decorate


@contextlib.contextmanager
def alone_with(record: Path) -> Iterator[None]:
    """Keep other processes that add to this record waiting, so that none writes over what another has added.

    It is the folder that is locked: nothing is left behind in it.
    """
    record.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(record.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def run(command: click.Command, arguments: Sequence[str] | None = None) -> int:
    """The exit code.

    Args:
        arguments: None for those of the command line.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        status = command.main(args=arguments, prog_name=command.name, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.exceptions.Abort):
        click.echo("\ninterrupted; what is in the record stays, the same command goes on from here", err=True)
        return INTERRUPTED
    except VivaceError as error:
        click.echo(f"{command.name}: {error}", err=True)
        return error.exit_code
    return status if isinstance(status, int) else 0
