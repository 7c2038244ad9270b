"""Quantisation of rows to e4m3 in one pass, each with a scale of its own, or with scales that are given."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _quantize_rows(  # type: ignore[no-untyped-def]
    x,
    out,
    scale,
    x_stride,
    out_stride,
    channels,
    BLOCK: tl.constexpr,  # noqa: N803
    IS_GIVEN: tl.constexpr,  # noqa: N803
) -> None:
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < channels
    value = tl.load(x + row.to(tl.int64) * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if IS_GIVEN:
        value = value * (1.0 / tl.load(scale + row))
    else:
        largest = tl.maximum(tl.max(tl.abs(value), axis=0), 1e-12)
        value = value * (448.0 / largest)  # the cast saturates
        tl.store(scale + row, largest / 448.0)
    tl.store(out + row.to(tl.int64) * out_stride + at, value.to(out.dtype.element_ty), mask=inside)


def quantize_rows(x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, is_given: bool = False) -> None:
    """Write `x`, divided by its rows' scales, to `out`.

    Args:
        x, out: (rows, channels), whose rows may be part of wider ones; `out` is e4m3.
        scale: (rows, 1), fp32: as `vivace.kernels.reference.quantize_rows` finds it, or given.
    """
    rows, channels = x.shape
    _quantize_rows[(rows,)](
        x,
        out,
        scale,
        x.stride(0),
        out.stride(0),
        channels,
        BLOCK=triton.next_power_of_2(channels),
        IS_GIVEN=is_given,
        num_warps=4,
    )
