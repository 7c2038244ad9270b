"""The predictions that `vivace plan` makes: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType

import click
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from vivace.cli.display.terminal import console


class Attempts:
    """Shows what is predicted, on standard error. Used as a context.

    On a terminal the line has the number of the prediction, its recipe and the time so far; it is gone when all
    are made.
    """

    def __init__(self) -> None:
        terminal = console(stderr=True)
        self._is_live = terminal.is_terminal
        self._number = 0
        self._line = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=terminal,
            transient=True,
            disable=not self._is_live,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Attempts:
        self._line.start()
        if self._is_live:
            self._task = self._line.add_task("starting")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.stop()

    def predicting(self, recipe: str) -> None:
        """Report the recipe whose memory is predicted next."""
        self._number += 1
        if self._task is None:
            click.echo(f"predicting {recipe}", err=True)
        else:
            self._line.update(self._task, description=f"prediction {self._number}: {recipe}", refresh=True)

    def trying(self, recipe: str) -> None:
        """Report a recipe that may fit, before its memory is predicted."""
        self._number += 1
        if self._task is None:
            click.echo(f"trying {recipe}", err=True)
        else:
            description = f"prediction {self._number}: does {recipe} fit?"
            self._line.update(self._task, description=description, refresh=True)

    def say(self, text: str) -> None:
        """Print a line beside the live one."""
        click.echo(text, err=True)
