"""Draw at every size that a recipe announces, so that later calls of these sizes compile nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vivace.foundation.spec.sizes import Size
from vivace.machinery.compilation.compiled_code import counting_graphs
from vivace.measure.accelerator import synchronise
from vivace.models.sources import example_images
from vivace.runtime.calls import Call, generators_of, prompts_of

if TYPE_CHECKING:
    from vivace.runtime.session import Session


@dataclass(frozen=True)
class WarmedSize:
    """The result of warming one size.

    Attributes:
        size: None for the pipeline's own default.
        first_call_s: of the first call, compilation included.
        second_call_s: of the next one, for comparison.
        graphs: how many graphs the first call compiled; 0 if the recipe compiles nothing, or had code for this size.
        graphs_later: how many the second call compiled.
        from_cache: how many of all of them the cache had already.
    """

    size: Size | None
    first_call_s: float
    second_call_s: float
    graphs: int
    graphs_later: int
    from_cache: int


def warm_up(self: Session, prompt: str | Sequence[str] = "", **call: Any) -> tuple[WarmedSize, ...]:
    """Draw twice at each size that the recipe announces, `compile(sizes=[...])`, or at the default size if none is.

    Later calls of these sizes, with as many prompts, compile and capture nothing. Pipelines that start from images
    get examples of each size.

    Args:
        prompt: one, or a list for a batch.
        call: other arguments of the call; `num_inference_steps=2` saves time where later steps need no other code.

    Raises:
        As a call of the session.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    return draw_twice(self, [(index, text, index) for index, text in enumerate(prompts)], **call)


def draw_twice(session: Session, images: Call, **call: Any) -> tuple[WarmedSize, ...]:
    """Draw twice at each announced size, or at the default size."""
    defaults = session.defaults
    own = Size(defaults["width"], defaults["height"]) if {"width", "height"} <= defaults.keys() else None
    sizes: tuple[Size | None, ...] = session.recipe.announced_sizes or (own,)
    return tuple(_draw_twice(session, images, size, call) for size in sizes)


def _draw_twice(session: Session, images: Call, size: Size | None, call: dict[str, Any]) -> WarmedSize:
    size_arguments = {} if size is None else {"width": size.width, "height": size.height}
    sources = {} if size is None else example_images(type(session.pipe).__name__, size_arguments)
    counted = counting_graphs()
    seconds, graphs = [], []
    for _ in range(2):
        arguments = prompts_of(images) | generators_of(images) | size_arguments | sources | call
        start = time.perf_counter()
        session(**arguments)
        synchronise(session.device)
        seconds.append(time.perf_counter() - start)
        graphs.append(int(str(counted()["compiled_graphs"])))
    in_cache = int(str(counted().get("graphs_from_cache", 0)))
    return WarmedSize(size, seconds[0], seconds[1], graphs[0], graphs[1] - graphs[0], in_cache)
