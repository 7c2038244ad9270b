"""Code of fixed shapes for several sizes: how many times torch.compile may compile, and what happens at the limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from vivace.errors import Unsupported

GRAPHS_PER_SIZE = 8
"""PyTorch's own limit of graphs of one function. A block that a model repeats in several widths needs one for each, and
so do batches."""


def graph_limit(num_sizes: int) -> int:
    """How often one function may be compiled where so many sizes are announced."""
    return GRAPHS_PER_SIZE * num_sizes


def limited(num_sizes: int) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which functions are compiled for so many sizes, and the next one is refused.

    By itself torch.compile logs a warning at its limit, and runs what is new uncompiled from then on.

    Raises:
        Unsupported: inside of the context, when the limit is reached.
    """

    @contextmanager
    def context() -> Iterator[None]:
        from torch._dynamo import config
        from torch._dynamo.exc import FailOnRecompileLimitHit

        limit = graph_limit(num_sizes)
        least = max(limit, config.recompile_limit), max(limit, config.accumulated_recompile_limit)
        with config.patch(
            recompile_limit=least[0], accumulated_recompile_limit=least[1], fail_on_recompile_limit_hit=True
        ):
            try:
                yield
            except FailOnRecompileLimitHit as error:
                raise Unsupported(
                    f"compile: a function is compiled for {least[0]} shapes already, which is the limit of "
                    f"{num_sizes} announced size{'s' * (num_sizes != 1)}; announce every size that is called, or "
                    "compile once for all with sizes=any"
                ) from error

    return context
