"""vivace recommend"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from vivace.cli.command import Why, command
from vivace.evidence.recommendation.recommendation import Goal
from vivace.foundation.spec.limits import MinQuality
from vivace.foundation.spec.settings import Option, Positional, PricePerHour, Settings, TaskName


class RecommendCommand(Settings):
    model: Annotated[str, Positional()]
    gpu: Annotated[
        str | None,
        Option('GPU, such as A100 or "RTX 4090"; default: this machine\'s, if it has one.', metavar="NAME"),
    ] = None
    max_memory: Annotated[
        str | None,
        Option("Hard limit on peak memory: 12GB (1e9 bytes each) or 12GiB.", metavar="SIZE"),
    ] = None
    min_quality: MinQuality = None
    goal: Annotated[Goal, Option("Figure to optimise; throughput and cost look at every batch size.")] = (
        "latency"
    )
    price_per_hour: Annotated[
        PricePerHour,
        Option("Price of an hour of the GPU, in any currency; --goal cost needs it.", metavar="P"),
    ] = None
    same_picture: Annotated[bool, Option("Only recipes that keep the image.")] = False
    task: Annotated[
        TaskName,
        Option(
            "Kind of input; default: what the model is published for. Records of other tasks do not count.",
        ),
    ] = None
    stores: Annotated[
        tuple[Path, ...],
        Option("Folder of your records; repeat for several. Default: .vivace, if there is one.", "--store"),
    ] = ()
    why: Why = False
    format_: Annotated[
        Literal["text", "json"], Option("Format of the answer on standard output.", "--format")
    ] = "text"


@command(RecommendCommand)
def recommend(settings: RecommendCommand) -> int:
    """Name the best recipe for a model on a GPU from existing records, in eight lines.

    Whether it fits, the seconds of an image and how they are known, the memory, what happens to the images, the line
    that draws, and the download. --why adds what the answer rests on, the runner-up and why it lost, what is left out
    or missing, and what to measure next.

    In this order: your own records on this GPU, then on others; the records that ship with vivace; numbers that others
    published. Recipes are compared within a source, against its baseline. Nothing is measured, loaded or downloaded.
    MODEL is a name, a folder in diffusers' format, or a .safetensors or .gguf file.

    \b
        vivace recommend flux-dev --gpu A100
        vivace recommend flux-dev --max-memory 24GB --same-picture
        vivace recommend sdxl --goal cost --price-per-hour 2.5 --format json
        vivace recommend tiny-sd --task inpaint
    """
    from vivace.cli.display.terminal import show
    from vivace.evidence.recommendation import recommend as asked
    from vivace.evidence.recommendation.answer import answer_of

    answer = asked(
        settings.model,
        gpu=settings.gpu,
        max_memory=settings.max_memory,
        min_quality=settings.min_quality,
        goal=settings.goal,
        price_per_hour=settings.price_per_hour,
        same_picture=settings.same_picture,
        task=settings.task,
        store=list(settings.stores) or None,
    )
    show(answer_of(answer), settings.format_, details=settings.why)
    return 0
