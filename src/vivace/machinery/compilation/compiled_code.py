"""Count the graphs that torch.compile makes in this process, and keep their code in a persistent cache.

Inductor caches the code of each graph on disk, so that another process that traces the same graph need not compile it.
Its default is a folder for temporary files, which may be emptied at the next boot; vivace uses a persistent folder.
`TORCHINDUCTOR_CACHE_DIR` overrides it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vivace.errors import Unsupported
from vivace.foundation.untrusted.files import cache_folder

if TYPE_CHECKING:
    import torch

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
TRITON_VARIABLE = "TRITON_CACHE_DIR"


def code_folder() -> Path:
    """Return the folder for compiled code: the environment variable's, or one in vivace's cache. It may be deleted."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = os.environ.get(VARIABLE)
    # Importing inductor may have set the variable to its default, which is not the user's choice.
    if folder and Path(folder) != Path(default_cache_dir()).absolute():
        return Path(folder)
    return cache_folder() / "inductor"


def keep_compiled_code() -> None:
    """Make this process cache compiled code in `code_folder`, or in inductor's default if that is not writable."""
    folder = code_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        os.environ[VARIABLE] = str(folder)
        # Of kernels written in Triton; inductor puts those that it generates there too.
        os.environ.setdefault(TRITON_VARIABLE, str(folder / "triton"))


def counting_graphs() -> Callable[[], dict[str, int | float | str]]:
    """Return a function that counts the process's graphs from now on, and those from either of the caches."""
    start = _counts()

    def counted() -> dict[str, int | float | str]:
        now = _counts()
        # If PyTorch's counters were cleared in between, start from zero.
        since = now - start if start <= now else now
        counts: dict[str, int | float | str] = {
            "compiled_graphs": since["graphs"],
            "graph_breaks": since["breaks"],
        }
        if since["whole_hits"] or since["code_hits"] or since["misses"]:
            # A graph cached as a whole does not look up its code, or finds it as well.
            counts["graphs_from_cache"] = max(since["whole_hits"], since["code_hits"])
            counts["graphs_not_in_cache"] = since["misses"]
        return counts

    return counted


def _counts() -> Counter[str]:
    from torch._dynamo.utils import counters

    whole, code = counters["aot_autograd"], counters["inductor"]
    return Counter(
        graphs=counters["stats"]["unique_graphs"],
        breaks=sum(counters["graph_break"].values()),
        whole_hits=whole["autograd_cache_hit"],
        code_hits=code["fxgraph_cache_hit"],
        misses=code["fxgraph_cache_miss"] + code["fxgraph_cache_bypass"],
    )


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
    """Return a context in which functions are compiled up to `graph_limit`, and beyond it refused (Unsupported)."""

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
