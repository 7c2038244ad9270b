"""vivace bench"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
from pydantic import Field

from vivace.benchmark.run_settings import RunSettings
from vivace.cli.command import Rerun, ResultsFormat, command, command_line, interrupted
from vivace.cli.measuring.bench_endpoint import ByEndpoint
from vivace.foundation.spec.limits import Limits, MinQuality
from vivace.foundation.spec.settings import (
    DEFAULT_STORE,
    NumGpus,
    Option,
    PricePerHour,
    Ray,
    Store,
    read_by,
)
from vivace.foundation.spec.study import Models, Study
from vivace.foundation.stats.until import Until

if TYPE_CHECKING:
    from vivace.benchmark import Run
    from vivace.foundation.spec.limits import Limits

GATE_FAILED = 1
SOME_NOT_MEASURED = 4


class BenchCommand(Study):
    endpoint: Annotated[
        str | None,
        Option(
            "Measure a server under load; its own options: `vivace bench --endpoint URL --help`.",
            metavar="URL",
        ),
    ] = None
    models: Models = ("tiny-sd",)
    until: Annotated[
        Until | None,
        read_by(Until.parse),
        Option(
            "Keep measuring beyond --rounds until each recipe has an answer: faster, slower, same 3%, or e.g. "
            "'faster|same 3%'.",
            metavar="ANSWER[|ANSWER...]",
        ),
    ] = None
    max_minutes: Annotated[
        float, Field(ge=0.1, le=100_000), Option("With --until: start no round that would end later.")
    ] = 60.0
    canaries: Annotated[
        bool,
        Option(
            "In each round, time its first recipe briefly once more at its end, to follow the machine's speed."
        ),
    ] = True
    store: Store = Path(DEFAULT_STORE)
    gpus: NumGpus = None
    ray: Ray = None
    rerun: Rerun = False
    limits: MinQuality = None
    price_per_hour: PricePerHour = None
    plan: Annotated[
        bool,
        Option(
            "After all timing on a GPU, compare the memory with the prediction of `vivace plan`; takes seconds."
        ),
    ] = True
    format_: ResultsFormat = "table"


@command(BenchCommand, ByEndpoint)
def bench(settings: BenchCommand) -> int:
    """Measure recipes on a model and compare them with the first.

    Each round of a recipe runs in a separate process; a crash, a hang or an out-of-memory error is recorded as the
    outcome of its row. Records are kept in the store: the same command again measures only what is missing.

    Images are compared with the baseline's: a recipe whose images are worse than the limits and the noise allow reads
    failed_quality and is never called the fastest. With --min-quality, the exit code is then 1.

    synthetic:NAME is the architecture of NAME with random weights: time and memory are NAME's; the images show nothing
    and are not judged.

    \b
        vivace bench --recipe baseline --recipe tiny_vae --recipe tiny_vae+steps:20
        vivace bench --recipe baseline --recipe steps:8 --prompt-set tinyworld --min-quality clip=0.98
        vivace bench --recipe baseline --recipe deepcache:2 --until "faster|same 3%"
        vivace bench --task inpaint --recipe baseline --recipe tiny_vae
        vivace bench --model synthetic:flux-dev --recipe baseline --recipe compile --text embeddings
    """
    from vivace.benchmark import run_study
    from vivace.benchmark.comparison import check_quality_options
    from vivace.cli.display.progress_display import for_this_terminal
    from vivace.models.find import find_model

    study = settings.part(Study)
    run_settings = settings.part(RunSettings, progress=for_this_terminal(), command=command_line())
    run_settings.check(study)
    if settings.limits is not None:
        for name in study.models:
            check_quality_options(find_model(name), "--min-quality")
    if settings.until is None and len(study.recipes) > 1:
        click.echo(able_to_tell(study.timing.rounds), err=True)
    try:
        run = run_study(study, run_settings)
    except KeyboardInterrupt:
        return interrupted("finished rounds are kept")
    for answer in run.answers:
        click.echo(f"until: {answer}", err=True)
    for prediction in run.planned:
        click.echo(str(prediction), err=True)
    return show_run(run, settings.format_, command_line(), settings.limits, settings.price_per_hour)


def show_run(
    run: Run, format_: str, reproduce: str, limits: Limits | None = None, price_per_hour: float | None = None
) -> int:
    """Print the answer of a run, then the next steps; return the exit code."""
    from vivace.cli.display.terminal import show
    from vivace.foundation.spec.limits import DEFAULT_LIMITS
    from vivace.foundation.spec.record import Outcome

    used = limits or DEFAULT_LIMITS
    answer = run.answer(used, price_per_hour)
    notes = dict.fromkeys(note for compared in run.comparisons for note in compared.limit_notes(used))
    show(replace(answer, notes=(*answer.notes, *notes), reproduce=reproduce), format_)
    rows = run.rows(used)
    if format_ == "table":
        if any(row.outcome is Outcome.CRASHED for row in rows):
            click.echo(f"output of crashed rounds: {run.store / 'logs'}", err=True)
        where = "" if str(run.store) == ".vivace" else f" --store {run.store}"
        click.echo(f"page with images: vivace report{where} -o page.html", err=True)
    if limits is not None and any(row.failed_quality for row in rows):
        return GATE_FAILED
    return 0 if all(row.record.outcome is Outcome.MEASURED for row in rows) else SOME_NOT_MEASURED


def able_to_tell(rounds: int) -> str:
    """Describe the smallest difference that this many rounds can detect."""
    from vivace.foundation.stats import DEFAULT_SPREAD, detectable, rounds_for_same

    plural = "s" if rounds > 1 else ""
    text = (
        f"with {rounds} round{plural} this can tell differences of {100 * detectable(rounds):.0f} % or more"
    )
    for margin in (0.01, 0.03):
        needed = rounds_for_same(margin)
        if needed is not None and needed > rounds:
            text += f"; `same` within {margin:.0%} takes about {needed} rounds"
    spread = f"if equal processes differ by {DEFAULT_SPREAD.sd:.0%}"
    return f"{text} ({spread}; --until goes on until each recipe has an answer)"
