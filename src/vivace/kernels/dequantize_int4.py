"""A Triton kernel that widens packed int4 weights in one pass: a byte in, two weights out."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BYTES = (
    2048  # a program's; two warps' worth of 16-byte loads would be less than a memory transaction's latency
)


# Triton reads annotations as code, and knows no `Any`.
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _widen(  # type: ignore[no-untyped-def]
    packed,
    scale,
    zero,
    wide,
    num_bytes,
    GROUP_BYTES: tl.constexpr,  # noqa: N803
    BYTES: tl.constexpr,  # noqa: N803
) -> None:
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    inside = at < num_bytes
    both = tl.load(packed + at, mask=inside, other=0).to(tl.int32)
    # Rows hold whole groups, so that groups may be counted through the whole of the weights.
    group = at // GROUP_BYTES
    width = tl.load(scale + group, mask=inside, other=0).to(tl.float32)
    middle = tl.load(zero + group, mask=inside, other=0).to(tl.float32)
    low = ((both & 15) - 8).to(tl.float32) * width + middle
    high = ((both >> 4) - 8).to(tl.float32) * width + middle
    pair = tl.program_id(0).to(tl.int64) * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    tl.store(wide + pair, tl.interleave(low, high).to(wide.dtype.element_ty), mask=pair < 2 * num_bytes)


def widen(packed: Any, scale: Any, zero: Any, dtype: Any) -> Any:
    """As `vivace.quantization.packed_int4.widened`; all contiguous, on one GPU."""
    rows, half = packed.shape
    wide = torch.empty((rows, 2 * half), dtype=dtype, device=packed.device)
    num_bytes = packed.numel()
    grid = (triton.cdiv(num_bytes, _BYTES),)
    _widen[grid](packed, scale, zero, wide, num_bytes, half // scale.shape[1], _BYTES)
    return wide
