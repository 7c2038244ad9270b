"""vivace bench"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from vivace.cli import options

if TYPE_CHECKING:
    from vivace.benchmark import Run
    from vivace.spec.limits import Limits

GATE_FAILED = 1
MEASURED_IN_PART = 4


def parse_repeats(context: click.Context, parameter: click.Parameter, value: str) -> int | None:
    """`auto` (None) or a whole number."""
    if value == "auto":
        return None
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= 10_000:
        raise click.BadParameter(f"{value!r} is neither 'auto' nor a whole number from 1 to 10000.")
    return int(value)


Batch = int | Literal["max"]


def parse_batches(context: click.Context, parameter: click.Parameter, value: str) -> tuple[Batch, ...]:
    """Whole numbers or `max`, separated by commas."""
    found: dict[Batch, None] = {}
    for part in (text.strip() for text in value.split(",")):
        if part == "max":
            found["max"] = None
        elif part.isascii() and part.isdigit() and 1 <= int(part) <= 4096:
            found[int(part)] = None
        else:
            raise click.BadParameter(
                f"{value!r} is not whole numbers from 1 to 4096 or max, separated by commas."
            )
    return tuple(found)


@click.command()
@click.option(
    "--model",
    "models",
    multiple=True,
    default=("tiny-sd",),
    show_default=True,
    help="Catalogue name, synthetic:NAME, org/repo[@revision], folder, file; repeat for more.",
)
@click.option(
    "--recipe",
    "recipes",
    multiple=True,
    required=True,
    metavar="R",
    help="A recipe; repeat for more. The first is the baseline.",
)
@click.option("--prompts", type=click.Path(path_type=Path), help="Text file, one prompt a line.")
@click.option(
    "--prompt-set",
    metavar="NAME",
    help="Instead, thirteen prompts at three seeds: tinyworld for the embedded models, real for others.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="The first seed.")
@click.option(
    "--seeds",
    type=click.IntRange(min=1, max=10_000),
    help="Seeds for each prompt; default: 1, of a prompt set 3.",
)
@options.workload
@click.option(
    "--batch",
    "batches",
    callback=parse_batches,
    default="1",
    show_default=True,
    metavar="N[,N...]",
    help="Pictures drawn in one call, max for as many as fit the GPU; several make a table each.",
)
@click.option(
    "--text",
    type=click.Choice(["prompts", "embeddings"]),
    default="prompts",
    show_default=True,
    help="embeddings: encode the prompts before the measured call.",
)
@click.option(
    "--repeats",
    callback=parse_repeats,
    default="auto",
    show_default=True,
    metavar="auto|N",
    help="Timed calls a round; auto: until the interval is narrow.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    default=2,
    show_default=True,
    help="Processes for each recipe, interleaved.",
)
@click.option(
    "--warmup",
    type=click.IntRange(1, 1000),
    default=8,
    show_default=True,
    help="Calls before timing, at most; fewer if the times are steady.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.1),
    default=600.0,
    show_default=True,
    help="Seconds for one round.",
)
@options.device
@options.threads
@options.store
@click.option("--rerun", is_flag=True, help="Measure again what is in the store already.")
@click.option(
    "--quality/--no-quality",
    default=True,
    show_default=True,
    help="After all timing, compare the pictures with the baseline's.",
)
@options.min_quality
@click.option(
    "--scorer",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="CLIP model for quality: embedded, a folder, org/name on the hub, or none; auto: the model's own.",
)
@click.option("--lpips", is_flag=True, help="Also compute LPIPS; AlexNet's weights must be there.")
@click.option(
    "--rivals/--no-rivals",
    default=True,
    show_default=True,
    help="Beside each step cache also measure fewer plain steps.",
)
@click.option(
    "--plan/--no-plan",
    "beside_plan",
    default=True,
    show_default=True,
    help="After all timing on a GPU, say how far off `vivace plan` would have been; takes seconds.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "json", "csv", "md"]),
    default="table",
    show_default=True,
    help="What to print on standard output.",
)
def bench(
    models: Sequence[str],
    recipes: Sequence[str],
    prompts: Path | None,
    prompt_set: str | None,
    seed: int,
    seeds: int | None,
    height: int | None,
    width: int | None,
    num_inference_steps: int | None,
    guidance_scale: float | None,
    batches: tuple[Batch, ...],
    text: str,
    repeats: int | None,
    rounds: int,
    warmup: int,
    timeout: float,
    device: str,
    threads: int | None,
    store: Path,
    rerun: bool,
    quality: bool,
    limits: Limits | None,
    scorer: str,
    lpips: bool,
    rivals: bool,
    beside_plan: bool,
    format_: str,
) -> int:
    """Measure recipes on a model and compare them with the first.

    Each round of a recipe runs in a process of its own; a crash, a hang or too little memory becomes an outcome of
    its row. Records are kept in the store: the same command again measures only what is missing.

    Pictures are held to the baseline's: a recipe that is worse beyond the limits and the noise reads failed_quality
    and is never called the fastest. With --min-quality exit code 1 says that one failed.

    A synthetic:NAME has the architecture of NAME and random weights: its times and memory are NAME's, its pictures
    show nothing and are not judged.

    \b
        vivace bench --recipe baseline --recipe tiny_vae --recipe tiny_vae+steps:20
        vivace bench --recipe baseline --recipe steps:8 --prompt-set tinyworld --min-quality clip=0.98
        vivace bench --model synthetic:flux-dev --recipe baseline --recipe compile --text embeddings
    """
    from vivace.benchmark import AskedQuality, AskedWorkload, Study, Timing, run_study
    from vivace.benchmark.comparison import check_judged
    from vivace.benchmark.planned import plan_again
    from vivace.benchmark.studies import start_launcher
    from vivace.cli.progress import for_this_terminal
    from vivace.models.find import find_model

    study = Study(
        models=models,
        recipes=recipes,
        workload=AskedWorkload(
            prompts=None if prompts is None else options.read_prompts(prompts),
            prompt_set=prompt_set,
            seed=seed,
            num_seeds=seeds,
            height=height,
            width=width,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            batches=batches,
            text=text,
        ),
        timing=Timing(rounds=rounds, repeats=repeats, max_warmup=warmup, timeout_s=timeout, threads=threads),
        quality=AskedQuality(enabled=quality, scorer=None if scorer == "none" else scorer, lpips=lpips),
        device=device,
        rivals=rivals,
    )
    if limits is not None:
        for name in models:
            check_judged(find_model(name), "--min-quality")
    progress = for_this_terminal()
    try:
        with start_launcher(device) as launcher:
            run = run_study(
                study,
                store=store,
                rerun=rerun,
                progress=progress,
                command=options.command_line(),
                launcher=launcher,
            )
            if beside_plan and progress.has_measured:
                for line in plan_again(run.records, launcher):
                    click.echo(str(line), err=True)
    except KeyboardInterrupt:
        click.echo("\ninterrupted; finished rounds are kept. The same command continues from here:", err=True)
        click.echo(f"  {options.command_line()}", err=True)
        return 130
    return show(run, format_, options.command_line(), limits)


def show(run: Run, format_: str, reproduce: str, limits: Limits | None = None) -> int:
    """Print a table for each comparison, the verdict and what to do next; returns the exit code."""
    from rich.console import Console

    from vivace.report.rows import shared_warnings
    from vivace.report.summary import noise_floor, summary
    from vivace.report.table import print_table, render
    from vivace.spec.limits import DEFAULT_LIMITS
    from vivace.spec.record import Outcome

    store = run.store
    tables = [compared.rows(limits or DEFAULT_LIMITS) for compared in run.comparisons]
    rows = [row for table in tables for row in table]
    console = Console()
    if format_ != "table":
        click.echo(render(rows, format_), nl=False)
    for table in tables if format_ == "table" else ():
        if len(tables) > 1 or table[0].record.trial.model.is_synthetic:
            batch = table[0].record.trial.workload.batch
            click.echo(table[0].model + (f", batch {batch}" if batch > 1 else ""))
        if console.is_terminal:
            print_table(table, console)
        else:
            click.echo(render(table, format_), nl=False)
        for warning in shared_warnings(table):
            click.echo(f"note, all rows: {warning}", err=True)
        if floor := noise_floor(table[0]):
            click.echo(floor, err=True)
        click.echo(f"\n{summary(table)}", err=True)
    if format_ == "table":
        if any(row.outcome is Outcome.CRASHED for row in rows):
            click.echo(f"what crashed rounds said: {store / 'logs'}", err=True)
        where = "" if str(store) == ".vivace" else f" --store {store}"
        click.echo(f"page with pictures: vivace report{where} -o page.html", err=True)
        click.echo(f"reproduce: {reproduce}", err=True)
    if limits is not None and any(row.failed_quality for row in rows):
        return GATE_FAILED
    return 0 if all(row.record.outcome is Outcome.MEASURED for row in rows) else MEASURED_IN_PART
