"""Rich consoles that keep their own escape codes and remove those in the text; and how a command shows its answer."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.segment import Segment

from vivace.answers.formatting import seconds
from vivace.foundation.untrusted.streams import plain, unchecked

if TYPE_CHECKING:
    from vivace.answers.answer import Answer


def console(*, stderr: bool = False) -> Console:
    """Return a rich console on standard output or error, whose text is cleaned and whose styles are kept."""
    return _PlainConsole(file=unchecked(sys.stderr if stderr else sys.stdout))


def show(answer: Answer, format_: str, page: Path | None = None, *, details: bool = True) -> None:
    """Print an answer on standard output, and write its page if one is asked for."""
    from vivace.answers.data import written
    from vivace.answers.terminal import print_answer, text_of

    terminal, is_text = console(), format_ in ("table", "text")
    if is_text and terminal.is_terminal:
        print_answer(answer, terminal, details=details)
    else:
        click.echo(text_of(answer, details=details) if is_text else written(answer, format_), nl=False)
    if format_ in ("json", "csv"):
        for note in answer.notes:
            click.echo(f"note: {note}", err=True)
    if page is not None:
        from vivace.answers.page import page_of
        from vivace.foundation.untrusted.destinations import replace

        replace(page, page_of(answer).encode())
        click.echo(f"page: {page}", err=True)
    if answer.reproduce and format_ not in ("json", "csv"):
        click.echo(f"reproduce: {answer.reproduce}", err=True)


class _PlainConsole(Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)


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
        self._number += 1
        if self._task is None:
            click.echo(f"predicting {recipe}", err=True)
        else:
            self._line.update(self._task, description=f"prediction {self._number}: {recipe}", refresh=True)

    def trying(self, recipe: str) -> None:
        self._number += 1
        if self._task is None:
            click.echo(f"trying {recipe}", err=True)
        else:
            description = f"prediction {self._number}: does {recipe} fit?"
            self._line.update(self._task, description=description, refresh=True)

    def say(self, text: str) -> None:
        click.echo(text, err=True)


class Phases:
    """Follows a request by its worker's events of phases. Used as a context; it ends with the last phase.

    Args:
        words: names of phases for readers, where they differ; {call} is the number of the call.
    """

    def __init__(self, words: Mapping[str, str] | None = None) -> None:
        self._words = words or {}
        self._took: dict[str, float] = defaultdict(float)
        self._phase: str | None = None
        self._since = 0.0
        terminal = console(stderr=True)
        self._line = Progress(
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=terminal,
            transient=True,
            disable=not terminal.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Phases:
        self._phase, self._since = "start", time.monotonic()
        self._line.start()
        self._task = self._line.add_task("starting a process")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._line.stop()

    def event(self, event: dict[str, Any]) -> None:
        if event.get("event") != "phase":
            return
        self._end()
        self._phase = event["phase"]
        words = self._words.get(event["phase"], event["phase"]).format(call=event.get("done", 0) + 1)
        assert self._task is not None
        self._line.reset(self._task, description=words)

    def took(self) -> str:
        """Return how long the phases took, e.g. "start 5.10 s, load 1.20 s, warm-up 3.40 s"."""
        return ", ".join(f"{phase} {seconds(took)}" for phase, took in self._took.items())

    def _end(self) -> None:
        now = time.monotonic()
        if self._phase is not None:
            self._took[self._phase] += now - self._since
        self._phase, self._since = None, now
