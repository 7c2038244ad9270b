"""Count the graphs that torch.compile makes in this process, and keep their code in a persistent cache.

Inductor caches the code of each graph on disk, so that another process that traces the same graph need not compile it.
Its default is a folder for temporary files, which may be emptied at the next boot; vivace uses a persistent folder.
`TORCHINDUCTOR_CACHE_DIR` overrides it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from vivace.foundation.untrusted.files import cache_folder

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
TRITON_VARIABLE = "TRITON_CACHE_DIR"


def code_folder() -> Path:
    """Return the folder for compiled code: the environment variable's, or one in vivace's cache.

    Its size is not limited; it may be deleted at any time.
    """
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
    """Return a function that counts the process's graphs from now on, and how many came from inductor's cache.

    A graph counts as cached if its whole compiled form was (aot_autograd's cache) or its code was (inductor's).
    """
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
    """Return the counts since the start of the process."""
    from torch._dynamo.utils import counters

    whole, code = counters["aot_autograd"], counters["inductor"]
    return Counter(
        graphs=counters["stats"]["unique_graphs"],
        breaks=sum(counters["graph_break"].values()),
        whole_hits=whole["autograd_cache_hit"],
        code_hits=code["fxgraph_cache_hit"],
        misses=code["fxgraph_cache_miss"] + code["fxgraph_cache_bypass"],
    )
