"""vivace bench"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from vivace.cli import options

if TYPE_CHECKING:
    from vivace.benchmark import Run
    from vivace.report.rows import Row
    from vivace.spec.limits import Limits
    from vivace.stats.until import Until

GATE_FAILED = 1
SOME_NOT_MEASURED = 4


def parse_repeats(context: click.Context, parameter: click.Parameter, value: str) -> int | None:
    """Return None for `auto`, or a whole number."""
    if value == "auto":
        return None
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= 10_000:
        raise click.BadParameter(f"{value!r} is not 'auto' or a whole number from 1 to 10000.")
    return int(value)


def parse_until(context: click.Context, parameter: click.Parameter, value: str | None) -> Until | None:
    """Return the answers that end the comparison; None without any."""
    if value is None:
        return None
    from vivace.stats.until import Until

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


@click.command()
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
@click.option(
    "--prompt-set",
    metavar="NAME",
    help="Built-in set of thirteen prompts at three seeds, instead of --prompts: tinyworld for the embedded models, "
    "edit for models that edit, real for others.",
)
@click.option(
    "--seed", type=click.IntRange(0, options.MAX_SEED), default=0, show_default=True, help="First seed."
)
@click.option(
    "--seeds",
    type=click.IntRange(min=1, max=10_000),
    help="Seeds per prompt; default: 1, or 3 with --prompt-set.",
)
@options.workload
@options.source_images(several=True)
@click.option(
    "--batch",
    "batches",
    callback=parse_batches,
    default="1",
    show_default=True,
    metavar="N[,N...]",
    help="Images per call, or max for as many as fit the GPU; each value gets its own table.",
)
@click.option(
    "--text",
    type=click.Choice(["prompts", "repeated", "embeddings"]),
    default="prompts",
    show_default=True,
    help="prompts: new ones in each call; repeated: the same in all, for prompt_cache; embeddings: encode the "
    "prompts before the timed call.",
)
@click.option(
    "--repeats",
    callback=parse_repeats,
    default="auto",
    show_default=True,
    metavar="auto|N",
    help="Timed calls per round; auto: until the interval is narrow.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    default=2,
    show_default=True,
    help="Rounds per recipe, each in its own process; recipes are interleaved.",
)
@click.option(
    "--until",
    callback=parse_until,
    metavar="ANSWER[|ANSWER...]",
    help="Go on beyond --rounds until each recipe has an answer: faster, slower, same 3%, or e.g. 'faster|same 3%'.",
)
@click.option(
    "--max-minutes",
    type=options.FiniteFloat(0.1, 100_000),
    default=60.0,
    show_default=True,
    help="With --until: no more rounds that would end later.",
)
@click.option(
    "--canaries/--no-canaries",
    default=True,
    show_default=True,
    help="Time a few calls of the baseline once more in each round, in a process of their own, to see how the machine "
    "moves.",
)
@click.option(
    "--warmup",
    type=click.IntRange(1, 1000),
    default=8,
    show_default=True,
    help="Most warm-up calls before timing; fewer once the times are steady.",
)
@click.option(
    "--timeout",
    type=options.FiniteFloat(0.1, 1_000_000),
    default=600.0,
    show_default=True,
    help="Time limit of a round, in seconds.",
)
@options.device
@options.threads
@options.store
@options.places
@click.option("--rerun", is_flag=True, help="Measure again what the store already has.")
@click.option(
    "--quality/--no-quality",
    default=True,
    show_default=True,
    help="After all timing, compare the images with the baseline's.",
)
@options.min_quality
@options.price
@options.scorer
@options.witness
@click.option("--lpips", is_flag=True, help="Also compute LPIPS; needs AlexNet's weights on this machine.")
@click.option(
    "--rivals/--no-rivals",
    default=True,
    show_default=True,
    help="For each step cache, also measure the same recipe with fewer steps instead.",
)
@click.option(
    "--plan/--no-plan",
    "check_plan",
    default=True,
    show_default=True,
    help="After all timing on a GPU, compare the memory with what `vivace plan` predicts; takes seconds.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "json", "csv", "md"]),
    default="table",
    show_default=True,
    help="Format of the results on standard output.",
)
def bench(
    models: Sequence[str],
    recipes: Sequence[str],
    prompts: list[str] | None,
    prompt_set: str | None,
    seed: int,
    seeds: int | None,
    height: int | None,
    width: int | None,
    num_inference_steps: int | None,
    guidance_scale: float | None,
    sources: options.Sources,
    batches: tuple[Batch, ...],
    text: str,
    repeats: int | None,
    rounds: int,
    until: Until | None,
    max_minutes: float,
    canaries: bool,
    warmup: int,
    timeout: float,
    device: str,
    threads: int | None,
    store: Path,
    gpus: int | Literal["all"] | None,
    ray: str | None,
    rerun: bool,
    quality: bool,
    limits: Limits | None,
    price: float | None,
    scorer: str,
    witness: str | None,
    lpips: bool,
    rivals: bool,
    check_plan: bool,
    format_: str,
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
    from vivace.benchmark import QualityRequest, Study, Timing, WorkloadRequest, run_study
    from vivace.benchmark.comparison import check_judged
    from vivace.benchmark.planned import plan_again
    from vivace.benchmark.studies import start_launcher
    from vivace.cli.progress import for_this_terminal
    from vivace.cli.until import able_to_tell, go_on
    from vivace.errors import UsageError
    from vivace.models.find import find_model
    from vivace.spec.input_errors import InputErrors

    if until is not None and (gpus is not None or ray is not None or rerun):
        flag = "--gpus" if gpus is not None else "--ray" if ray is not None else "--rerun"
        raise UsageError(f"--until goes on with what is stored, in one place; leave out {flag}")

    with InputErrors():
        study = Study(
            models=models,
            recipes=recipes,
            workload=WorkloadRequest(
                prompts=None if prompts is None else tuple(prompts),
                prompt_set=prompt_set,
                seed=seed,
                num_seeds=seeds,
                height=height,
                width=width,
                num_inference_steps=num_inference_steps,
                guidance_scale=guidance_scale,
                batches=batches,
                text=text,
                **sources,
            ),
            timing=Timing(
                rounds=rounds, repeats=repeats, max_warmup=warmup, timeout_s=timeout, threads=threads
            ),
            quality=QualityRequest(
                enabled=quality, scorer=None if scorer == "none" else scorer, witness=witness, lpips=lpips
            ),
            device=device,
            rivals=rivals,
        )
    if limits is not None:
        for name in models:
            check_judged(find_model(name), "--min-quality")
    progress = for_this_terminal()
    try:
        with start_launcher(device) as launcher:

            def run_rounds(number: int) -> Run:
                return run_study(
                    study.model_copy(update={"timing": study.timing.model_copy(update={"rounds": number})}),
                    store=store,
                    rerun=rerun,
                    progress=progress,
                    command=options.command_line(),
                    launcher=launcher,
                    gpus=gpus,
                    ray=ray,
                    canaries=canaries,
                )

            if until is None:
                if len(recipes) > 1:
                    click.echo(able_to_tell(rounds), err=True)
                run = run_rounds(rounds)
            else:
                run = go_on(run_rounds, until, rounds, max_minutes)
            if check_plan and progress.has_measured:
                for line in plan_again(run.records, launcher):
                    click.echo(str(line), err=True)
    except KeyboardInterrupt:
        click.echo("\ninterrupted; finished rounds are kept. To continue, run the same command:", err=True)
        click.echo(f"  {options.command_line()}", err=True)
        return 130
    return show(run, format_, options.command_line(), limits, price)


def show(
    run: Run, format_: str, reproduce: str, limits: Limits | None = None, price: float | None = None
) -> int:
    """Print each comparison's table and verdict, then the next steps; return the exit code."""
    from vivace.cli.progress import title_of
    from vivace.report.rows import priced
    from vivace.report.table import render
    from vivace.spec.limits import DEFAULT_LIMITS
    from vivace.spec.record import Outcome

    store = run.store
    tables = [priced(compared.rows(limits or DEFAULT_LIMITS), price) for compared in run.comparisons]
    rows = [row for table in tables for row in table]
    if format_ == "table":
        _print_tables(tables)
    elif format_ == "md" and len(tables) > 1:  # a Markdown table has no columns for the model and the batch
        titled = [f"**{title_of(table[0].record)}**\n\n{render(table, format_)}" for table in tables]
        click.echo("\n".join(titled), nl=False)
    else:
        click.echo(render(rows, format_), nl=False)
    if format_ == "table":
        if any(row.outcome is Outcome.CRASHED for row in rows):
            click.echo(f"output of crashed rounds: {store / 'logs'}", err=True)
        where = "" if str(store) == ".vivace" else f" --store {store}"
        click.echo(f"page with images: vivace report{where} -o page.html", err=True)
        click.echo(f"reproduce: {reproduce}", err=True)
    if limits is not None and any(row.failed_quality for row in rows):
        return GATE_FAILED
    return 0 if all(row.record.outcome is Outcome.MEASURED for row in rows) else SOME_NOT_MEASURED


def _print_tables(tables: list[list[Row]]) -> None:
    """Print tables on standard output, and what must be said about them on standard error."""
    from vivace.cli.progress import title_of
    from vivace.cli.terminal import console, say
    from vivace.report.rows import shared_warnings
    from vivace.report.summary import noise_floor, summary
    from vivace.report.table import print_table, render

    terminal = console()
    for index, table in enumerate(tables):
        if index > 0:
            click.echo()
        trial = table[0].record.trial
        if len(tables) > 1 or trial.model.is_synthetic or trial.workload.task != "text":
            click.echo(title_of(table[0].record))
        if terminal.is_terminal:
            print_table(table, terminal)
        else:
            click.echo(render(table, "table"), nl=False)
        for warning in shared_warnings(table):
            say(f"note, all rows: {warning}")
        if floor := noise_floor(table[0]):
            say(floor)
        say(f"\n{summary(table)}")
