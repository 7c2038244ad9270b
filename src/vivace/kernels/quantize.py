"""Quantisation to e4m3 with a scale that is given, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _quantize(  # type: ignore[no-untyped-def]
    x,
    out,
    scale,
    x_stride,
    out_stride,
    channels,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < channels
    value = tl.load(x + row.to(tl.int64) * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    value = value * (1.0 / tl.load(scale))  # the cast saturates
    tl.store(out + row.to(tl.int64) * out_stride + at, value.to(out.dtype.element_ty), mask=inside)


def quantize(x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor) -> None:
    """Write `x`, divided by the first of `scale`, to `out`.

    Args:
        x, out: (rows, channels), whose rows may be part of wider ones; `out` is e4m3.
        scale: (1 or more,), fp32.
    """
    rows, channels = x.shape
    _quantize[(rows,)](
        x,
        out,
        scale,
        x.stride(0),
        out.stride(0),
        channels,
        BLOCK=triton.next_power_of_2(channels),
        num_warps=4,
    )
