"""vivace tune"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vivace.cli import options
from vivace.cli.spec_options import IMAGES, SEARCH, SETTINGS, TIMING, collect
from vivace.foundation.untrusted.destinations import check_writable

if TYPE_CHECKING:
    from vivace.recipes.recipe import Recipe
    from vivace.tuning.results import Result
    from vivace.tuning.search_settings import SearchSettings

NOTHING_FOUND = 4


def _amount(parse: str) -> Callable[[click.Context, click.Parameter, str | None], float | None]:
    """Return a callback that reads an amount with its unit by a function of `vivace.foundation.spec.arguments`."""

    def read(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
        if value is None:
            return None
        from vivace.errors import UsageError
        from vivace.foundation.spec import arguments

        try:
            return float(getattr(arguments, parse)(value))
        except UsageError as error:
            raise click.BadParameter(f"{error}.") from None

    return read


@options.command()
@click.argument("model", default="tiny-sd")
@click.option(
    "--goal",
    type=click.Choice(["latency", "throughput", "memory", "cost"]),
    default="latency",
    show_default=True,
    help="latency: time of one image; throughput and cost: time per image of four; memory: the peak.",
)
@click.option(
    "--max-memory",
    "max_memory_bytes",
    callback=_amount("parse_bytes"),
    metavar="SIZE",
    help="Limit of the peak memory, e.g. 12GB.",
)
@options.min_quality
@options.scorer
@options.witness
@click.option(
    "--max-first-call",
    "max_first_call_s",
    callback=_amount("parse_seconds"),
    metavar="TIME",
    help="Limit of the first call, compilation included, e.g. 60s.",
)
@click.option(
    "--minutes",
    type=options.FiniteFloat(0.1, 10_000),
    help="Time for the whole search; default: 8, or no limit with --trials.",
)
@click.option(
    "--trials",
    type=click.IntRange(1, 10_000),
    help="Number of recipes to measure; those already in the store count.",
)
@click.option(
    "--gpus",
    callback=options.parse_gpus,
    metavar="N|all",
    help="Search on this many GPUs of this host; the final runs on one.",
)
@click.option("--start", metavar="RECIPE", help="Recipe to begin with.")
@click.option(
    "--keep", multiple=True, metavar="TECHNIQUE", help="Technique that every recipe has; repeat for more."
)
@click.option(
    "--without", multiple=True, metavar="TECHNIQUE", help="Technique that no recipe has; repeat for more."
)
@click.option(
    "--trust-quality-of",
    metavar="NAME",
    help="For random weights: also search techniques that kept the quality of this embedded model in the store.",
)
@options.workload
@options.source_images(several=True)
@options.prompts()
@click.option(
    "--batch", type=click.IntRange(1, 4096), default=1, help="Images per call; default: as the goal says."
)
@options.timeout
@options.price
@options.device
@options.threads
@options.store
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    show_default=True,
    help="Seed of the search's choices.",
)
@click.option(
    "--explain", is_flag=True, help="Also print the expected gain of each technique, and its sources."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to write the page of the search; default: tune-MODEL.html in the store.",
)
@options.text_or_json("answer")
@collect(timing=TIMING, request=IMAGES, run=SETTINGS, settings=SEARCH)
def tune(model: str, settings: SearchSettings, explain: bool, output: Path | None, format_: str) -> int:
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
    from vivace.cli.terminal import show
    from vivace.tuning.tune_answer import answer_of
    from vivace.tuning.tuner import search_recipe

    if output is not None:
        check_writable(output)
    settings = replace(settings, run=replace(settings.run, command=options.command_line()))
    try:
        tuned = search_recipe(model, settings, SearchDisplay(settings.allowed_minutes, settings.trials))
    except KeyboardInterrupt:
        click.echo("\ninterrupted; finished rounds are kept. To go on, run the same command:", err=True)
        click.echo(f"  {options.command_line()}", err=True)
        return 130
    page = output or settings.run.folder / f"{file_stem(f'tune-{model}')}.html"
    show(answer_of(tuned), format_, page, details=explain)
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
        from vivace.tuning.utility import best_of

        # Not those that were refused without being measured.
        self._shown.add(result.recipe)
        tried = {result.recipe for result in history if result.is_measured} | self._shown
        number = len([recipe for recipe in tried if not recipe.is_baseline])
        text = result.outcome.value.replace("_", " ")
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
