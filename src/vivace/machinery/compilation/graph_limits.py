"""Code of fixed shapes for several sizes: the number of compilations that torch.compile may make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from vivace.errors import Unsupported

if TYPE_CHECKING:
    import torch

GRAPHS_PER_SIZE = 8
"""PyTorch's own limit of graphs of one function. A block that a model repeats in several widths needs one for each, and
so do batches."""


def graph_limit(num_sizes: int, num_kinds: int = 1) -> int:
    """Return how often a function may be compiled, from the announced sizes and the kinds of a repeated block."""
    return GRAPHS_PER_SIZE * max(1, num_sizes) * num_kinds


def num_kinds(blocks: Iterable[torch.nn.Module]) -> int:
    """Return the number of kinds of one block: the same block with other weights, some quantised, has its own code."""
    kinds: dict[str, set[tuple[str, ...]]] = {}
    for block in blocks:
        parts = tuple(f"{name} {type(weight).__name__}" for name, weight in block.named_parameters())
        kinds.setdefault(type(block).__name__, set()).add(parts)
    return max(map(len, kinds.values()), default=1)


def limited(num_sizes: int, num_kinds: int = 1) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which functions are compiled up to `graph_limit`, and beyond it refused.

    By itself torch.compile logs a warning at its limit, and runs what is new uncompiled from then on.

    Raises:
        Unsupported: inside of the context, when the limit is reached.
    """

    @contextmanager
    def context() -> Iterator[None]:
        from torch._dynamo import config
        from torch._dynamo.exc import FailOnRecompileLimitHit

        limit = max(graph_limit(num_sizes, num_kinds), config.recompile_limit)
        with config.patch(
            recompile_limit=limit,
            accumulated_recompile_limit=max(limit, config.accumulated_recompile_limit),
            fail_on_recompile_limit_hit=True,
        ):
            try:
                yield
            except FailOnRecompileLimitHit as error:
                announced = (
                    f"the limit of {num_sizes} announced size{'s' * (num_sizes != 1)}; announce every size that is "
                    "called, or"
                    if num_sizes
                    else "the limit;"
                )
                raise Unsupported(
                    f"compile: a function is compiled for {limit} shapes already, which is {announced} compile once "
                    "for all with sizes=any"
                ) from error

    return context
