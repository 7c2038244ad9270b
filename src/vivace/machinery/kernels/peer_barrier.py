"""A barrier between GPUs that write to each other's memory, as a kernel, so that a CUDA graph can contain it.

Every GPU counts its barriers. It writes its count to a slot on each other GPU, and waits until each of those has
written at least the same count here. Counts only grow, so nothing has to be reset, whatever the order of arrival.

One warp does this, a lane for each GPU: a write to another GPU is waited for, and one after the other they took 11 us
among four H100s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LANES = 32  # of a warp: with fewer elements than threads, several threads would hold the same
_TRIES = 100  # between two looks at host memory, which take longer


@triton.jit
def _any(lanes):
    return tl.max(lanes.to(tl.int32), axis=0) > 0


@triton.jit
def _barrier(
    count,
    slots,
    others,
    abandoned,
    rank,
    NUM: tl.constexpr,
    LANES: tl.constexpr,
    TRIES: tl.constexpr,
) -> None:
    mine = tl.atomic_add(count, 1) + 1
    lane = tl.arange(0, LANES)
    is_other = (lane < NUM) & (lane != rank)
    address = tl.zeros([LANES], tl.int64)
    for gpu in tl.static_range(NUM):
        address = tl.where(lane == gpu, others[gpu].to(tl.int64), address)
    there = address.to(tl.pointer_type(tl.int64)) + rank
    # What earlier kernels of this stream have written is visible to whoever sees the count.
    counts = tl.zeros([LANES], tl.int64) + mine
    tl.atomic_xchg(there, counts, mask=is_other, sem="release", scope="sys")
    none = tl.zeros([LANES], tl.int64)
    arrived = tl.atomic_add(slots + lane, none, mask=is_other, sem="acquire", scope="sys")
    while _any(is_other & (arrived < mine)):
        tries = 0
        while _any(is_other & (arrived < mine)) & (tries < TRIES):
            arrived = tl.atomic_add(slots + lane, none, mask=is_other, sem="acquire", scope="sys")
            tries += 1
        if _any(is_other & (arrived < mine)):
            arrived += tl.load(abandoned, volatile=True)


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
    assert len(slots) <= _LANES
    _barrier[(1,)](
        count, slots[rank], slots, abandoned, rank, NUM=len(slots), LANES=_LANES, TRIES=_TRIES, num_warps=1
    )
