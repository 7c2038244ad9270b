"""vivace tune"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from vivace.cli.command import command, command_line, interrupted
from vivace.foundation.spec.settings import FILE, Option, Positional
from vivace.foundation.untrusted.destinations import check_writable
from vivace.tuning.settings import SearchSettings

if TYPE_CHECKING:
    from vivace.recipes.recipe import Recipe
    from vivace.tuning.search.results import Result

NOTHING_FOUND = 4


class TuneCommand(SearchSettings):
    model: Annotated[str, Positional()] = "tiny-sd"
    explain: Annotated[bool, Option("Also print the expected gain of each technique, and its sources.")] = (
        False
    )
    output: Annotated[
        Path | None,
        Option(
            "Where to write the page of the search; default: tune-MODEL.html in the store.",
            "-o --output",
            path=FILE,
        ),
    ] = None
    format_: Annotated[
        Literal["text", "json"], Option("Format of the answer on standard output.", "--format")
    ] = "text"


@command(TuneCommand)
def tune(settings: TuneCommand) -> int:
    """Find and prove the fastest recipe for MODEL that keeps the images and fits the limits.

    Measures little: the effects of techniques are learnt from few trials, from the store and from vivace's own
    records. The best recipes are measured again, interleaved with the baseline, and their quality is judged in full.

    Everything is kept in the store: interrupted, the same command goes on.

    \b
        vivace tune tiny-sd --minutes 4
        vivace tune synthetic:sdxl --max-memory 8GB --max-first-call 60s
        vivace tune tiny-flux --task inpaint
    """
    from vivace.answers.formatting import file_stem
    from vivace.cli.display.terminal import show
    from vivace.tuning.answer import answer_of
    from vivace.tuning.tuner import search_recipe

    if settings.output is not None:
        check_writable(settings.output)
    watcher = SearchDisplay(settings.allowed_minutes, settings.trials)
    watched = settings.model_copy(update={"watcher": watcher, "command": command_line()})
    try:
        tuned = search_recipe(settings.model, watched)
    except KeyboardInterrupt:
        return interrupted("finished rounds are kept")
    page = settings.output or settings.store / f"{file_stem(f'tune-{settings.model}')}.html"
    show(answer_of(tuned), settings.format_, page, details=settings.explain)
    return 0 if tuned.pick is not None else NOTHING_FOUND


class SearchDisplay:
    """Prints a line for each result on standard error: the best so far, and the time left."""

    def __init__(self, minutes: float | None, trials: int | None) -> None:
        self.trials = trials
        self.minutes = minutes
        self.started = time.monotonic()
        self._shown: set[Recipe] = set()

    def note(self, text: str) -> None:
        """Print a note in full, and a list of recipes as far as it fits the line."""
        for line in textwrap.wrap(text, 80) if text.startswith("note: ") else [_fit(text, "")]:
            click.echo(line, err=True)

    def measured(self, result: Result, history: Sequence[Result]) -> None:
        from vivace.tuning.search.results import best_of

        # Not those that were refused without being measured.
        self._shown.add(result.recipe)
        tried = {result.recipe for result in history if result.is_measured} | self._shown
        number = len([recipe for recipe in tried if not recipe.is_baseline])
        text = result.outcome_in_words
        if result.gain is not None:
            text = f"{math.exp(result.gain):.2f}x"
            text += "" if result.gate is None else f", quality {result.verdict}"
        click.echo(_fit(f"[{number}] {result.recipe.text}", f": {text}"), err=True)
        best = best_of(history)
        if best is not None and best.gain is not None:
            state = "" if best.gate is None else f", quality {best.verdict}"
            line = f"    best {math.exp(best.gain):.2f}x {best.recipe.text}"
            click.echo(_fit(line, f"{state}; {self._left(number)}"), err=True)

    def final(self, finalists: Sequence[Recipe]) -> None:
        click.echo(f"final, interleaved with the baseline ({self._left(None)}):", err=True)
        for recipe in finalists:
            click.echo(_fit(f"    {recipe.text}", ""), err=True)

    def _left(self, number: int | None) -> str:
        parts = []
        if self.trials is not None and number is not None:
            left = max(0, self.trials - number)
            parts.append(f"{left} {'trial' if left == 1 else 'trials'} left")
        if self.minutes is not None:
            left_s = max(0.0, 60 * self.minutes - (time.monotonic() - self.started))
            parts.append(f"{int(left_s) // 60} min {int(left_s) % 60:02d} s left")
        return ", ".join(parts) or "no limit"


def _fit(text: str, tail: str, width: int = 80) -> str:
    """Shorten the text so that it fits a line together with its tail."""
    room = width - len(tail)
    return (text if len(text) <= room else text[: room - 1] + "…") + tail
