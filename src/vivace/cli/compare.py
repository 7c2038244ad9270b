"""vivace compare"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vivace.cli import options
from vivace.cli.spec_options import TIMING, WORKLOAD, collect

if TYPE_CHECKING:
    from vivace.foundation.spec.record import Record
    from vivace.foundation.spec.study import WorkloadRequest
    from vivace.foundation.spec.timing import Timing
    from vivace.foundation.stats.sequential import Decision


def parse_percentage(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Return the share of a percentage such as `3%` or `0.5 %`; 0.03 for `3%`."""
    if value is None:
        return None
    text = value.strip()
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = math.nan
    if not text.endswith("%") or not 0 <= number <= 1000:
        raise click.BadParameter(f"{value!r} is not a percentage from 0% to 1000%, such as 3%.")
    return number / 100


@options.command()
@click.argument("recipe_a")
@click.argument("recipe_b")
@options.model
@click.option(
    "--fail-if",
    callback=parse_percentage,
    metavar="N%",
    help="Slowdown of RECIPE_B that is allowed; the exit code is 1 only if it is certainly slower by more.",
)
@options.prompts()
@options.seed
@options.workload
@options.source_images(several=True)
@options.batch
@options.text
@options.repeats
@click.option(
    "--max-pairs",
    type=click.IntRange(3, 100),
    default=32,
    show_default=True,
    help="Maximum number of pairs of rounds; after them the verdict may be unclear.",
)
@click.option(
    "--max-minutes",
    type=options.FiniteFloat(0.01, 1_000_000),
    default=60.0,
    show_default=True,
    help="Start no pair after this time.",
)
@options.warmup
@options.timeout
@options.device
@options.threads
@options.store
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="Format of the result on standard output.",
)
@collect(workload=WORKLOAD, timing=TIMING)
def compare(
    recipe_a: str,
    recipe_b: str,
    model: str,
    fail_if: float | None,
    workload: WorkloadRequest,
    timing: Timing,
    max_pairs: int,
    max_minutes: float,
    device: str,
    store: Path,
    format_: str,
) -> int:
    """Decide whether RECIPE_B is faster than RECIPE_A, slower, or the same within 1 %; for CI jobs.

    Pairs of rounds are measured, A B, then B A, each in its own process, until the verdict is certain. With --fail-if,
    until it is certain whether B is slower by more than that. Rounds are kept in the store: the same command goes on
    where an interrupted one stopped. Image quality is not judged; `vivace bench` does that.

    Exit codes: 0 B is not slower than allowed, 1 B is slower (by more than 1 %, or than --fail-if allows), 4 a recipe
    was not measured, 5 still unclear at --max-pairs or --max-minutes; others as for all commands.

    \b
        vivace compare baseline bf16 --model tiny-sd
        vivace compare baseline fuse_qkv --model sdxl --fail-if 3% --steps 20 --format json
        vivace compare baseline tiny_vae --task image --strength 0.5
    """
    from vivace.benchmark.pairs import compare as run_compare

    try:
        paired = run_compare(
            model,
            recipe_a,
            recipe_b,
            fail_if=fail_if,
            max_pairs=max_pairs,
            max_minutes=max_minutes,
            store=store,
            command=options.command_line(),
            on_pair=say_pair,
            on_note=lambda note: click.echo(f"note: {note}", err=True),
            workload=workload,
            timing=timing,
            device=device,
        )
    except KeyboardInterrupt:
        click.echo("\ninterrupted; finished rounds are kept. To continue, run the same command:", err=True)
        click.echo(f"  {options.command_line()}", err=True)
        return 130
    from vivace.benchmark.pairs_answer import answer_of
    from vivace.cli.terminal import show

    answer = answer_of(paired)
    show(answer, format_)
    return int(answer.data["exit_code"])


def say_pair(decision: Decision, records: Sequence[Record]) -> None:
    from vivace.answers.formatting import seconds
    from vivace.benchmark.pairs_answer import difference

    times = " and ".join(seconds(_last_s(record)) for record in records)
    click.echo(f"pair {decision.num_pairs}: {times} a call; so far {difference(decision)}", err=True)


def _last_s(record: Record) -> float:
    import statistics

    return statistics.median(sample.total_s for sample in record.rounds[-1].samples)
