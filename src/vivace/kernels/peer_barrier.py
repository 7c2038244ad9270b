"""A barrier between GPUs that write to each other's memory, as a kernel, so that a CUDA graph can contain it.

Every GPU counts its barriers. It writes its count to a slot on each other GPU, and waits until each of those has
written at least the same count here. Counts only grow, so nothing has to be reset, whatever the order of arrival.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TRIES = 100  # between two looks at host memory, which take longer


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _barrier(  # type: ignore[no-untyped-def]
    count,
    slots,
    others,
    abandoned,
    rank,
    NUM: tl.constexpr,  # noqa: N803
    TRIES: tl.constexpr,  # noqa: N803
) -> None:
    mine = tl.atomic_add(count, 1) + 1
    for other in tl.static_range(NUM):
        if other != rank:
            # What earlier kernels of this stream have written is visible to whoever sees the count.
            tl.atomic_xchg(others[other] + rank, mine, sem="release", scope="sys")
    for other in tl.static_range(NUM):
        if other != rank:
            there = tl.atomic_add(slots + other, 0, sem="acquire", scope="sys")
            while there < mine:
                tries = 0
                while (there < mine) & (tries < TRIES):
                    there = tl.atomic_add(slots + other, 0, sem="acquire", scope="sys")
                    tries += 1
                if there < mine:
                    there += tl.load(abandoned, volatile=True)


def peer_barrier(
    count: torch.Tensor, slots: tuple[torch.Tensor, ...], abandoned: torch.Tensor, rank: int
) -> None:
    """Wait, on the current stream, until all GPUs have come here; their writes before it can be read after it.

    Args:
        count: (1,), of barriers so far, in this GPU's own memory.
        slots: for each GPU (GPUs,), what the others have written there; those of `rank` are this GPU's own.
        abandoned: (1,), 0, in pinned host memory. A large number there ends the wait, and every later one: the others
            will not come. Host memory, since the host has to be able to write it while it waits for the GPU itself.
        rank: of this GPU.

    All are int64, and 0 at first.
    """
    _barrier[(1,)](count, slots[rank], slots, abandoned, rank, NUM=len(slots), TRIES=_TRIES, num_warps=1)
