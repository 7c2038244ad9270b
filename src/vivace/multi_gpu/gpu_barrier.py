"""A Triton kernel of one warp in which GPUs of one host wait for each other.

Why ours: PyTorch's barrier of symmetric memory waits for a signal and nothing else. When a process has died, none will
come, and what would send one in its place has to ask CUDA for it, which may wait in turn: for the GPU to have nothing
to do, or for room among the kernels that were launched. Here the host writes a number into memory of its own.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

MOST_GPUS = 32  # one a thread of the warp


# Triton reads annotations as code, and knows no `Any`.
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _wait_for_all(  # type: ignore[no-untyped-def]
    pads,
    count,
    over,
    rank,
    num,
    WIDTH: tl.constexpr,  # noqa: N803
) -> None:
    peers = tl.arange(0, WIDTH)
    others = (peers < num) & (peers != rank)
    # Counted by the GPU: a CUDA graph repeats the same launch.
    now = tl.atomic_add(count, 1) + 1 + tl.zeros([WIDTH], tl.int32)
    theirs = tl.load(pads + peers, mask=others, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(theirs + rank, now, mask=others, sem="release", scope="sys")
    own = tl.load(pads + rank).to(tl.pointer_type(tl.int32))
    missing = tl.sum(others.to(tl.int32))
    looks = 0
    while missing > 0:
        seen = tl.atomic_add(own + peers, 0, mask=others, sem="acquire", scope="sys")
        # A difference, so that counts may pass the largest number.
        missing = tl.sum((others & (seen - now < 0)).to(tl.int32))
        looks += 1
        # Seldom: the host's memory is a microsecond away. In Triton `and` would look each time.
        if looks % 64 == 0:  # noqa: SIM102
            if tl.load(over, volatile=True) != 0:
                missing = 0


def wait_for_all(pads: Any, count: Any, over: Any, rank: int, num: int) -> None:
    """What comes after it on any GPU sees what came before it on every one.

    Args:
        pads: addresses of one pad a process, `num` int64 on this GPU. A pad holds an int32 for each process, 0 at the
            beginning, and is the memory of the GPU that waits at it.
        count: one int32 on this GPU, 0 at the beginning.
        over: one int32 in page-locked memory of the host: anything but 0, and nobody is waited for any more.
    """
    _wait_for_all[(1,)](pads, count, over, rank, num, MOST_GPUS, num_warps=1)
