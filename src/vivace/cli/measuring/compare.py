"""vivace compare"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click
from pydantic import Field

from vivace.cli.command import CiFiles, command, command_line, interrupted
from vivace.foundation.spec.settings import (
    DEFAULT_STORE,
    Batch,
    CallSettings,
    DeviceName,
    ModelName,
    Option,
    Positional,
    Prompts,
    Seed,
    SourceSettings,
    Store,
    TaskName,
    Threads,
    Timeout,
    read_by,
)
from vivace.foundation.spec.study import TextForm, WorkloadRequest
from vivace.foundation.spec.timing import MaxWarmup, Repeats, Timing

if TYPE_CHECKING:
    from vivace.foundation.spec.record import Record
    from vivace.foundation.stats.sequential import Decision


def parse_percentage(value: str) -> float:
    """Return the share of a percentage such as `3%` or `0.5 %`; 0.03 for `3%`."""
    text = value.strip()
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = math.nan
    if not text.endswith("%") or not 0 <= number <= 1000:
        raise ValueError(f"{value!r} is not a percentage from 0% to 1000%, such as 3%")
    return number / 100


class CompareCommand(CiFiles, SourceSettings, CallSettings):
    recipe_a: Annotated[str, Positional()]
    recipe_b: Annotated[str, Positional()]
    model: ModelName = "tiny-sd"
    fail_if: Annotated[
        float | None,
        read_by(parse_percentage),
        Option(
            "Slowdown of RECIPE_B that is allowed; the exit code is 1 only if it is certainly slower by more.",
            metavar="N%",
        ),
    ] = None
    prompts: Prompts = None
    seed: Seed = 0
    task: TaskName = None
    batch: Batch = 1
    text: TextForm = "prompts"
    repeats: Repeats = None
    max_pairs: Annotated[
        int,
        Field(ge=3, le=100),
        Option("Maximum number of pairs of rounds; after them the verdict may be unclear."),
    ] = 32
    max_minutes: Annotated[float, Field(ge=0.01, le=1_000_000), Option("Start no pair after this time.")] = (
        60.0
    )
    max_warmup: MaxWarmup = 8
    timeout_s: Timeout = 600.0
    device: DeviceName = "auto"
    threads: Threads = None
    store: Store = Path(DEFAULT_STORE)
    format_: Annotated[
        Literal["table", "json"], Option("Format of the result on standard output.", "--format")
    ] = "table"


@command(CompareCommand)
def compare(settings: CompareCommand) -> int:
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

    settings.check_ci_files()
    try:
        paired = run_compare(
            settings.model,
            settings.recipe_a,
            settings.recipe_b,
            fail_if=settings.fail_if,
            max_pairs=settings.max_pairs,
            max_minutes=settings.max_minutes,
            store=settings.store,
            command=command_line(),
            on_pair=say_pair,
            workload=settings.part(WorkloadRequest, batches=(settings.batch,)),
            timing=settings.part(Timing),
            device=settings.device,
        )
    except KeyboardInterrupt:
        return interrupted("finished rounds are kept")
    from vivace.benchmark.pairs import answer_of
    from vivace.cli.display.terminal import show

    answer = answer_of(paired)
    show(answer, settings.format_)
    settings.write_ci_files(answer)
    return int(answer.data["exit_code"])


def say_pair(decision: Decision, records: Sequence[Record]) -> None:
    from vivace.answers.formatting import seconds
    from vivace.benchmark.pairs import difference

    times = " and ".join(seconds(_last_s(record)) for record in records)
    click.echo(f"pair {decision.num_pairs}: {times} a call; so far {difference(decision)}", err=True)


def _last_s(record: Record) -> float:
    import statistics

    return statistics.median(sample.total_s for sample in record.rounds[-1].samples)
