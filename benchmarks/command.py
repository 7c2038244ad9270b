"""Shared parts of the benchmark commands: error handling as in `vivace`, and options for resumable measuring."""

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
    """The values of the options that `measures` adds.

    record: None for the script's default.
    started: time.monotonic() at the start.
    """

    record: Path | None
    store: Path
    limit_s: float | None
    timing: Timing
    device: str
    started: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        """Whether the time limit is reached."""
        return self.limit_s is not None and time.monotonic() - self.started >= self.limit_s

    def ended(self, following: str) -> int:
        """Print what comes next when the time limit is reached; return the exit code."""
        click.echo(f"{self.limit_s:g} s are over; the same command goes on with {following}", err=True)
        return MEASURED_IN_PART


def measures(
    *, record: str, repeats: int, warmup: int, timeout_s: float = 400.0, rounds: int = 1
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorate a command's function with the options of measuring; it receives a `Measuring` as `how`.

    Args:
        record: description of the script's default record.
        repeats, warmup, timeout_s: the defaults; calls, calls, and seconds per round.
        rounds: per recipe.
    """
    options = (
        click.option("--record", type=click.Path(path_type=Path, dir_okay=False), help=f"Default: {record}."),
        click.option("--store", type=click.Path(path_type=Path), default=".vivace", show_default=True),
        click.option(
            "--limit-s", type=click.FloatRange(min=0), help="Start no recipe after this many seconds."
        ),
        click.option(
            "--repeats", type=click.IntRange(1, 1000), default=repeats, show_default=True, help="Timed calls."
        ),
        click.option(
            "--warmup", type=click.IntRange(1, 100), default=warmup, show_default=True, help="Warm-up calls."
        ),
        click.option(
            "--timeout",
            type=click.FloatRange(min=1),
            default=timeout_s,
            show_default=True,
            help="Seconds per recipe.",
        ),
        click.option(
            "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True
        ),
    )

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(function)
        def wrapper(
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
            timing = Timing(rounds=rounds, repeats=repeats, max_warmup=warmup, timeout_s=timeout)
            return function(how=Measuring(record, store, limit_s, timing, device), **others)

        for option in reversed(options):
            wrapper = option(wrapper)
        return wrapper

    return decorate


@contextlib.contextmanager
def locked(record: Path) -> Iterator[None]:
    """Lock a record, so that concurrent processes do not overwrite each other's rows.

    The lock is on the folder, so no lock file is left.
    """
    record.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(record.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def run(command: click.Command, arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

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
        click.echo("\ninterrupted; the record is kept, and the same command resumes from it", err=True)
        return INTERRUPTED
    except VivaceError as error:
        click.echo(f"{command.name}: {error}", err=True)
        return error.exit_code
    return status if isinstance(status, int) else 0


def record_on(record: Path, device: str) -> Path:
    """Return the record of a device: rows of a CPU and of a GPU are never in one file."""
    return record if device == "cpu" else record.with_name(f"{record.stem}-{device}{record.suffix}")
