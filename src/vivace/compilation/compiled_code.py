"""What torch.compile made in this process, and where it keeps its code between processes.

Inductor keeps the code of each graph on disk, under a key of the graph and all that it was made with, so that another
process which traces the same graph need not compile it. By default that is a folder for temporary files, which the next
start of the machine empties; here it is a lasting one. `TORCHINDUCTOR_CACHE_DIR` says where instead.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from vivace.contract.cache_folder import cache_folder

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def code_folder() -> Path:
    """The folder that compiled code is kept in: the variable's, or one in vivace's cache.

    Its size has no limit; it may be deleted at any time.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    given = os.environ.get(VARIABLE)
    # Importing inductor may already have written its own default there, which is nobody's wish.
    if given and Path(given) != Path(default_cache_dir()).absolute():
        return Path(given)
    return cache_folder() / "inductor"


def keep_compiled_code() -> None:
    """Let this process keep its compiled code in `code_folder`; where that cannot be written, in inductor's own."""
    folder = code_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        os.environ[VARIABLE] = str(folder)


def counting_graphs() -> Callable[[], dict[str, int | float | str]]:
    """Returns what counts the process's graphs from now on, and how many of inductor's were found compiled already.

    A graph counts as found if its whole compiled form was (aot_autograd's cache) or its code was (inductor's).
    """
    start = _counts()

    def counted() -> dict[str, int | float | str]:
        now = _counts()
        # Who clears PyTorch's counters in between begins anew.
        since = now - start if start <= now else now
        found: dict[str, int | float | str] = {
            "compiled_graphs": since["graphs"],
            "graph_breaks": since["breaks"],
        }
        if since["whole_hits"] or since["code_hits"] or since["misses"]:
            # A graph found whole never asks for its code, or finds that too.
            found["graphs_from_cache"] = max(since["whole_hits"], since["code_hits"])
            found["graphs_not_in_cache"] = since["misses"]
        return found

    return counted


def _counts() -> Counter[str]:
    """Since the process began."""
    from torch._dynamo.utils import counters

    whole, code = counters["aot_autograd"], counters["inductor"]
    return Counter(
        graphs=counters["stats"]["unique_graphs"],
        breaks=sum(counters["graph_break"].values()),
        whole_hits=whole["autograd_cache_hit"],
        code_hits=code["fxgraph_cache_hit"],
        misses=code["fxgraph_cache_miss"] + code["fxgraph_cache_bypass"],
    )
