"""GEGLU and rounding to e4m3 with a scale for each row, in one pass.

The activation's bound is the product of two bounds, each of which typical elements are far below: a scale from it
would leave e4m3 too few of its binades. So each row has a scale of its own, from its largest element: a program holds
the row. The next matmul computes with the values alone, since a row's scale can be multiplied into its output, which
the kernel that reads it does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vivace.machinery.kernels.blocks import two_blocks
from vivace.machinery.kernels.reference import E4M3_MAX, TINY


@triton.jit
def _values(
    x,
    bias,
    channels,
    at,
    HAS_BIAS: tl.constexpr,
):
    inside = at < channels
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + channels + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
        gate += tl.load(bias + channels + at, mask=inside, other=0.0).to(tl.float32)
    # The normal distribution beyond |gate|, to 1e-7: Abramowitz and Stegun, 7.1.26. tl.erf takes a quarter more
    # instructions.
    t = 1.0 / (1.0 + 0.23164189 * tl.abs(gate))
    tail = 0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)
    tail = t * (0.127414796 + t * (-0.142248368 + t * tail)) * tl.exp2(gate * gate * -0.7213475204444817)
    return value * gate * tl.where(gate < 0.0, tail, 1.0 - tail)


@triton.jit
def _geglu(
    x,
    bias,
    out,
    scales,
    x_stride,
    out_stride,
    channels,
    largest,
    tiny,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    QUANTIZE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    own, to = x + row * x_stride, out + row * out_stride
    at = tl.arange(0, FIRST)
    value = _values(own, bias, channels, at, HAS_BIAS)
    by = 1.0
    if QUANTIZE:
        reached = tl.max(tl.abs(value), axis=0)
    if SECOND:
        more = FIRST + tl.arange(0, SECOND)
        rest = _values(own, bias, channels, more, HAS_BIAS)
        if QUANTIZE:
            reached = tl.maximum(reached, tl.max(tl.abs(rest), axis=0))
    if QUANTIZE:
        scale = tl.maximum(reached, tiny) / largest
        tl.store(scales + row, scale)
        by = 1.0 / scale
    tl.store(to + at, (value * by).to(out.dtype.element_ty), mask=at < channels)
    if SECOND:
        tl.store(to + more, (rest * by).to(out.dtype.element_ty), mask=more < channels)


def geglu(
    up: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, scales: torch.Tensor | None
) -> None:
    """Write h GELU(g), of `up` and its bias, whose first half is h and whose second is g, to `out`.

    Args:
        up: (rows, 2 channels); bias: (2 channels,), or None.
        out: (rows, channels), whose rows may be part of wider ones: bf16, or e4m3 divided by scales.
        scales: (rows,), fp32, are written; None: nothing is rounded to e4m3.
    """
    rows, channels = out.shape
    first, second = two_blocks(channels)
    _geglu[(rows,)](
        up,
        bias if bias is not None else up,
        out,
        scales if scales is not None else up,
        up.stride(0),
        out.stride(0),
        channels,
        E4M3_MAX,
        TINY,
        FIRST=first,
        SECOND=second,
        HAS_BIAS=bias is not None,
        QUANTIZE=scales is not None,
        num_warps=8 if first > 2048 else 4,
    )
