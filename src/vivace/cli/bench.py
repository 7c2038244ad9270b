"""vivace bench"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import click

from vivace.cli import options
from vivace.cli.bench_endpoint import ByEndpoint
from vivace.cli.spec_options import QUALITY, SETTINGS, STUDY, TIMING, WORKLOAD, collect, option

if TYPE_CHECKING:
    from vivace.benchmark import Run, RunSettings, Study
    from vivace.foundation.spec.limits import Limits
    from vivace.foundation.stats.until import Until

GATE_FAILED = 1
SOME_NOT_MEASURED = 4


def parse_until(context: click.Context, parameter: click.Parameter, value: str | None) -> Until | None:
    """Return the answers that end the comparison; None without any."""
    if value is None:
        return None
    from vivace.foundation.stats.until import Until

    return Until.parse(value)


Batch = int | Literal["max"]


def parse_batches(context: click.Context, parameter: click.Parameter, value: str) -> tuple[Batch, ...]:
    """Return the batch sizes of a list such as `1,2,max`, without duplicates."""
    batches: dict[Batch, None] = {}
    for part in (text.strip() for text in value.split(",")):
        if part == "max":
            batches["max"] = None
        elif part.isascii() and part.isdigit() and 1 <= int(part) <= 4096:
            batches[int(part)] = None
        else:
            raise click.BadParameter(
                f"{value!r} is not a list of whole numbers from 1 to 4096, or max, separated by commas."
            )
    return tuple(batches)


@options.command(ByEndpoint)
@click.option(
    "--endpoint",
    metavar="URL",
    expose_value=False,
    help="Measure a server under load; its own options: `vivace bench --endpoint URL --help`.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    default=("tiny-sd",),
    show_default=True,
    help="Model name, synthetic:NAME, org/repo[@revision], folder or file; repeat for more.",
)
@click.option(
    "--recipe",
    "recipes",
    multiple=True,
    required=True,
    metavar="R",
    help="A recipe; repeat for more. The first is the baseline.",
)
@options.prompts()
@option(WORKLOAD, "prompt_set", metavar="NAME")
@options.seed
@option(WORKLOAD, "num_seeds", "--seeds", type=click.IntRange(min=1, max=10_000))
@options.workload
@options.source_images(several=True)
@option(
    WORKLOAD,
    "batches",
    "--batch",
    type=str,
    callback=parse_batches,
    default="1",
    metavar="N[,N...]",
)
@options.text
@options.repeats
@option(TIMING, "rounds")
@click.option(
    "--until",
    callback=parse_until,
    metavar="ANSWER[|ANSWER...]",
    help="Keep measuring beyond --rounds until each recipe has an answer: faster, slower, same 3%, or e.g. "
    "'faster|same 3%'.",
)
@click.option(
    "--max-minutes",
    type=options.FiniteFloat(0.1, 100_000),
    default=60.0,
    show_default=True,
    help="With --until: start no round that would end later.",
)
@click.option(
    "--canaries/--no-canaries",
    default=True,
    show_default=True,
    help="In each round, time its first recipe briefly once more at its end, to follow the machine's speed.",
)
@options.warmup
@options.timeout
@options.device
@options.threads
@options.store
@options.places
@click.option("--rerun", is_flag=True, help="Measure again what the store already has.")
@option(QUALITY, "enabled", "--quality/--no-quality")
@options.min_quality
@options.price
@options.scorer
@options.witness
@option(QUALITY, "lpips", is_flag=True, show_default=False)
@option(STUDY, "rivals", "--rivals/--no-rivals")
@click.option(
    "--plan/--no-plan",
    default=True,
    show_default=True,
    help="After all timing on a GPU, compare the memory with the prediction of `vivace plan`; takes seconds.",
)
@options.results_format
@collect(workload=WORKLOAD, timing=TIMING, quality=QUALITY, study=STUDY, settings=SETTINGS)
def bench(
    study: Study, settings: RunSettings, limits: Limits | None, price_per_hour: float | None, format_: str
) -> int:
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
    from vivace.cli.progress_display import for_this_terminal
    from vivace.models.find import find_model

    settings.check(study)
    if limits is not None:
        for name in study.models:
            check_quality_options(find_model(name), "--min-quality")
    settings = replace(settings, progress=for_this_terminal(), command=options.command_line())
    if settings.until is None and len(study.recipes) > 1:
        click.echo(able_to_tell(study.timing.rounds), err=True)
    try:
        run = run_study(study, settings)
    except KeyboardInterrupt:
        click.echo("\ninterrupted; finished rounds are kept. To continue, run the same command:", err=True)
        click.echo(f"  {options.command_line()}", err=True)
        return 130
    for answer in run.answers:
        click.echo(f"until: {answer}", err=True)
    for prediction in run.planned:
        click.echo(str(prediction), err=True)
    return show_run(run, format_, options.command_line(), limits, price_per_hour)


def show_run(
    run: Run, format_: str, reproduce: str, limits: Limits | None = None, price_per_hour: float | None = None
) -> int:
    """Print the answer of a run, then the next steps; return the exit code."""
    from vivace.cli.terminal import show
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
