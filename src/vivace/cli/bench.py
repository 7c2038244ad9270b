"""vivace bench"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vivace.cli import options

if TYPE_CHECKING:
    from vivace.spec.record import Record

MEASURED_IN_PART = 4


def parse_repeats(context: click.Context, parameter: click.Parameter, value: str) -> int | None:
    """`auto` (None) or a whole number."""
    if value == "auto":
        return None
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= 10_000:
        raise click.BadParameter(f"{value!r} is neither 'auto' nor a whole number from 1 to 10000.")
    return int(value)


@click.command()
@options.model
@click.option(
    "--recipe",
    "recipes",
    multiple=True,
    required=True,
    metavar="R",
    help="A recipe; repeat for more. The first is the baseline.",
)
@click.option("--prompts", type=click.Path(path_type=Path), help="Text file, one prompt a line.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="The first seed.")
@click.option(
    "--seeds",
    type=click.IntRange(min=1, max=10_000),
    default=1,
    show_default=True,
    help="Seeds for each prompt.",
)
@options.workload
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
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "json", "csv", "md"]),
    default="table",
    show_default=True,
    help="What to print on standard output.",
)
def bench(
    model: str,
    recipes: Sequence[str],
    prompts: Path | None,
    seed: int,
    seeds: int,
    height: int | None,
    width: int | None,
    num_inference_steps: int | None,
    guidance_scale: float | None,
    repeats: int | None,
    rounds: int,
    warmup: int,
    timeout: float,
    device: str,
    threads: int | None,
    store: Path,
    rerun: bool,
    quality: bool,
    format_: str,
) -> int:
    """Measure recipes on a model and compare them with the first.

    Each round of a recipe runs in a process of its own; a crash, a hang or too little memory becomes an outcome of
    its row. Records are kept in the store: the same command again measures only what is missing.

    \b
        vivace bench --recipe baseline --recipe tiny_vae --recipe tiny_vae+steps:20
    """
    from vivace.benchmark import Plan
    from vivace.benchmark import bench as run_bench
    from vivace.cli.progress import for_this_terminal

    try:
        records = run_bench(
            model,
            recipes,
            prompts=options.read_prompts(prompts) if prompts is not None else None,
            seed=seed,
            num_seeds=seeds,
            height=height,
            width=width,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            plan=Plan(rounds=rounds, repeats=repeats, max_warmup=warmup, timeout_s=timeout, threads=threads),
            device=device,
            store=store,
            rerun=rerun,
            quality=quality,
            progress=for_this_terminal(),
            command=options.command_line(),
        )
    except KeyboardInterrupt:
        click.echo("\ninterrupted; finished rounds are kept. The same command goes on from here:", err=True)
        click.echo(f"  {options.command_line()}", err=True)
        return 130
    return show(records, format_, store, options.command_line())


def show(records: Sequence[Record], format_: str, store: Path, reproduce: str) -> int:
    """Print the table, the verdict and how to go on; returns the exit code."""
    from rich.console import Console

    from vivace.benchmark.store import Store
    from vivace.report.rows import rows_of, shared_warnings
    from vivace.report.summary import summary
    from vivace.report.table import print_table, render
    from vivace.spec.record import Outcome

    with Store.read_only(store) as opened:
        rows = rows_of(records, opened.figures())
    console = Console()
    if format_ == "table" and console.is_terminal:
        print_table(rows, console)
    else:
        click.echo(render(rows, format_), nl=False)
    if format_ == "table":
        for warning in shared_warnings(rows):
            click.echo(f"note, all rows: {warning}", err=True)
        if any(row.outcome is Outcome.CRASHED for row in rows):
            click.echo(f"what crashed rounds said: {store / 'logs'}", err=True)
        click.echo(f"\n{summary(rows)}", err=True)
        where = "" if str(store) == ".vivace" else f" --store {store}"
        click.echo(f"page with pictures: vivace report{where} -o page.html", err=True)
        click.echo(f"reproduce: {reproduce}", err=True)
    return 0 if all(row.outcome is Outcome.MEASURED for row in rows) else MEASURED_IN_PART
