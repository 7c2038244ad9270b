"""vivace recommend"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from vivace.cli import options
from vivace.foundation.spec.task_names import TASKS

if TYPE_CHECKING:
    from vivace.foundation.spec.limits import Limits
    from vivace.foundation.spec.workload import Task


@click.command()
@click.argument("model")
@click.option(
    "--gpu", metavar="NAME", help='GPU, such as A100 or "RTX 4090"; default: this machine\'s, if it has one.'
)
@click.option(
    "--max-memory",
    metavar="SIZE",
    help="Hard limit on peak memory: 12GB (1e9 bytes each) or 12GiB.",
)
@options.min_quality
@click.option(
    "--goal",
    type=click.Choice(["latency", "memory", "throughput", "cost", "stability"]),
    default="latency",
    show_default=True,
    help="Figure to optimise; throughput and cost look at every batch size.",
)
@click.option(
    "--price-per-hour",
    type=options.FiniteFloat(0, 1_000_000, min_open=True),
    metavar="P",
    help="Price of an hour of the GPU, in any currency; --goal cost needs it.",
)
@click.option("--same-picture", is_flag=True, help="Only recipes that keep the image.")
@click.option(
    "--task",
    type=click.Choice(TASKS),
    help="Kind of input; default: what the model is published for. Records of other tasks do not count.",
)
@click.option(
    "--store",
    "stores",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Folder of your records; repeat for several. Default: .vivace, if there is one.",
)
@options.text_or_json("answer")
def recommend(
    model: str,
    gpu: str | None,
    max_memory: str | None,
    limits: Limits | None,
    goal: Literal["latency", "memory", "throughput", "cost", "stability"],
    price_per_hour: float | None,
    same_picture: bool,
    task: Task | None,
    stores: tuple[Path, ...],
    format_: str,
) -> int:
    """Name the best recipe for a model from existing records, and say how sure that is.

    In this order: your own records on this GPU, then on others; the records that ship with vivace; numbers that others
    published. Recipes are compared within a source, against its baseline. Nothing is measured, loaded or downloaded.

    The answer comes with its evidence, what is known about the images, the runner-up and why it lost, what to run next,
    and which evidence is missing. Recipes that cannot be told apart are a tie; the simplest is named.

    \b
        vivace recommend flux-dev --gpu A100
        vivace recommend flux-dev --max-memory 24GB --same-picture
        vivace recommend sdxl --goal cost --price-per-hour 2.5 --format json
        vivace recommend tiny-sd --task inpaint
    """
    from vivace.cli.terminal import show
    from vivace.evidence.recommendation import recommend as asked
    from vivace.evidence.recommendation.recommend_answer import answer_of

    answer = asked(
        model,
        gpu=gpu,
        max_memory=max_memory,
        min_quality=limits,
        goal=goal,
        price_per_hour=price_per_hour,
        same_picture=same_picture,
        task=task,
        store=list(stores) or None,
    )
    show(answer_of(answer), format_)
    return 0
