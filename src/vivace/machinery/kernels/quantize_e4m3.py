"""Quantisation to e4m3 in one pass, with a fixed scale or one for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vivace.machinery.kernels.reference import E4M3_MAX, TINY, two_blocks

_ROWS = 4


@triton.jit
def _quantize(
    x,
    out,
    scale,
    x_stride,
    out_stride,
    channels,
    BLOCK: tl.constexpr,
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


# The number of rows is not compiled in, so that another size of an image is not another kernel.
@triton.jit(do_not_specialize=["rows"])
def _quantize_rows(
    x,
    out,
    scales,
    rows,
    x_stride,
    out_stride,
    channels,
    largest,
    tiny,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    at = tl.arange(0, FIRST)[None, :]
    inside = (at < channels) & exists[:, None]
    own, to = x + row[:, None] * x_stride, out + row[:, None] * out_stride
    value = tl.load(own + at, mask=inside, other=0.0).to(tl.float32)
    reached = tl.max(tl.abs(value), axis=1)
    if SECOND:
        more = FIRST + tl.arange(0, SECOND)[None, :]
        within = (more < channels) & exists[:, None]
        rest = tl.load(own + more, mask=within, other=0.0).to(tl.float32)
        reached = tl.maximum(reached, tl.max(tl.abs(rest), axis=1))
    scale = tl.maximum(reached, tiny) / largest
    tl.store(scales + row, scale, mask=exists)
    tl.store(to + at, (value / scale[:, None]).to(out.dtype.element_ty), mask=inside)
    if SECOND:
        tl.store(to + more, (rest / scale[:, None]).to(out.dtype.element_ty), mask=within)


def quantize_rows(x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor) -> None:
    """Write `x` (rows, channels) to an e4m3 `out`, divided by scales (rows,), fp32, which are written as well.

    The rows of both may be part of wider ones.
    """
    rows, channels = out.shape
    first, second = two_blocks(channels)
    _quantize_rows[(triton.cdiv(rows, _ROWS),)](
        x,
        out,
        scales,
        rows,
        x.stride(0),
        out.stride(0),
        channels,
        E4M3_MAX,
        TINY,
        ROWS=_ROWS,
        FIRST=first,
        SECOND=second,
        num_warps=4,
    )
