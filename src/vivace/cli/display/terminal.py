"""Rich consoles that keep their own escape codes and remove those in the text; and how a command shows its answer."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
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


class _LiveLine:
    """A line on standard error that is gone at the end, with the time so far; a context. Nothing without a terminal."""

    def __init__(self, first: str, *columns: ProgressColumn) -> None:
        terminal = console(stderr=True)
        self._is_live = terminal.is_terminal
        self._line = Progress(
            *columns,
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=terminal,
            transient=True,
            disable=not self._is_live,
        )
        self._task = self._line.add_task(first)

    def __enter__(self) -> Self:
        self._line.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._line.stop()


class Attempts(_LiveLine):
    """Shows the number of a prediction of memory, and its recipe; a line for each without a terminal."""

    def __init__(self) -> None:
        super().__init__("starting", SpinnerColumn())
        self._number = 0

    def predicting(self, recipe: str) -> None:
        self._show(f"predicting {recipe}", recipe)

    def trying(self, recipe: str) -> None:
        self._show(f"trying {recipe}", f"does {recipe} fit?")

    def say(self, text: str) -> None:
        click.echo(text, err=True)

    def _show(self, plain_line: str, text: str) -> None:
        self._number += 1
        if self._is_live:
            self._line.update(self._task, description=f"prediction {self._number}: {text}", refresh=True)
        else:
            self.say(plain_line)


class Phases(_LiveLine):
    """Follows a request by its worker's events of phases; it ends with the last phase.

    Args:
        words: names of phases for readers, where they differ; {call} is the number of the call.
    """

    def __init__(self, words: Mapping[str, str] | None = None) -> None:
        super().__init__("starting a process")
        self._words = words or {}
        self._took: dict[str, float] = defaultdict(float)
        self._phase, self._since = "start", time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._begin("")
        super().__exit__(*error)

    def event(self, event: dict[str, Any]) -> None:
        if event.get("event") == "phase":
            self._begin(event["phase"])
            words = self._words.get(event["phase"], event["phase"]).format(call=event.get("done", 0) + 1)
            self._line.reset(self._task, description=words)

    def took(self) -> str:
        """Return how long the phases took, e.g. "start 5.10 s, load 1.20 s, warm-up 3.40 s"."""
        return ", ".join(f"{phase} {seconds(took)}" for phase, took in self._took.items())

    def _begin(self, phase: str) -> None:
        now = time.monotonic()
        self._took[self._phase] += now - self._since
        self._phase, self._since = phase, now
