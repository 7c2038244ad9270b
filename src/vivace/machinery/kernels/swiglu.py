"""SwiGLU, beside attention's output where one matmul takes both, and rounding to e4m3 with a scale for each row.

The activation's bound is the product of two bounds, each of which typical elements are far below. So each row has a
scale of its own, from its largest element, as in `vivace.machinery.kernels.geglu`. A single block's last matmul takes
attention's output as well: the scale is that of both. If that output is in e4m3 already, with one scale for all rows,
a row's scale is that one times a power of two, so that nothing is rounded twice but what becomes subnormal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vivace.machinery.kernels.blocks import two_blocks
from vivace.machinery.kernels.reference import E4M3_MAX, TINY


@triton.jit
def _gated(x, hidden, at):
    inside = at < hidden
    gate = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + hidden + at, mask=inside, other=0.0).to(tl.float32)
    return value * gate / (1.0 + tl.exp(-gate))


@triton.jit
def _loaded(x, channels, at):
    return tl.load(x + at, mask=at < channels, other=0.0).to(tl.float32)


@triton.jit
def _stored(out, value, by, at, length):
    tl.store(out + at, (value * by).to(out.dtype.element_ty), mask=at < length)


@triton.jit
def _swiglu(
    up,
    attended,
    attended_scale,
    out,
    scales,
    up_stride,
    out_stride,
    hidden,
    channels,
    largest,
    tiny,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    FIRST_ATTENDED: tl.constexpr,
    SECOND_ATTENDED: tl.constexpr,
    IS_SCALED: tl.constexpr,
    QUANTIZE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    own, to = up + row * up_stride, out + row * out_stride
    at = tl.arange(0, FIRST)
    value = _gated(own, hidden, at)
    reached = tl.max(tl.abs(value), axis=0)
    if SECOND:
        later = FIRST + tl.arange(0, SECOND)
        rest = _gated(own, hidden, later)
        reached = tl.maximum(reached, tl.max(tl.abs(rest), axis=0))
    unit = 1.0
    if IS_SCALED:
        unit = tl.load(attended_scale)
    if FIRST_ATTENDED:
        of_row = attended + row * channels
        at_attended = tl.arange(0, FIRST_ATTENDED)
        mean = _loaded(of_row, channels, at_attended) * unit
        reached = tl.maximum(reached, tl.max(tl.abs(mean), axis=0))
        if SECOND_ATTENDED:
            later_attended = FIRST_ATTENDED + tl.arange(0, SECOND_ATTENDED)
            rest_of_mean = _loaded(of_row, channels, later_attended) * unit
            reached = tl.maximum(reached, tl.max(tl.abs(rest_of_mean), axis=0))
    by = 1.0
    if QUANTIZE:
        scale = tl.maximum(reached, tiny) / largest
        if IS_SCALED:
            # The next power of two: an exponent one higher, unless all bits of the mantissa are 0.
            bits = (scale / unit).to(tl.int32, bitcast=True)
            scale = unit * ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        tl.store(scales + row, scale)
        by = 1.0 / scale
    _stored(to + channels, value, by, at, hidden)
    if SECOND:
        _stored(to + channels, rest, by, later, hidden)
    if FIRST_ATTENDED:
        _stored(to, mean, by, at_attended, channels)
        if SECOND_ATTENDED:
            _stored(to, rest_of_mean, by, later_attended, channels)


def swiglu(
    up: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    attended: torch.Tensor | None = None,
    attended_scale: torch.Tensor | None = None,
) -> None:
    """Write attention's output, if there is one, and SiLU(g) h beside it to `out`.

    Args:
        up: (rows, 2 hidden): g, then h; rows may be part of wider ones.
        out: (rows, channels + hidden), which may be part of wider rows: bf16, or e4m3 divided by scales.
        scales: (rows,), fp32, are written; None: nothing is rounded to e4m3.
        attended: (rows, channels), contiguous: bf16, or e4m3 with a scale.
        attended_scale: (1,), fp32.
    """
    hidden = up.shape[1] // 2
    channels = 0 if attended is None else attended.shape[1]
    assert out.shape[1] == channels + hidden
    assert attended is None or attended.is_contiguous()
    first, second = two_blocks(hidden)
    first_attended, second_attended = two_blocks(channels) if channels else (0, 0)
    _swiglu[(up.shape[0],)](
        up,
        up if attended is None else attended,
        up if attended_scale is None else attended_scale,
        out,
        up if scales is None else scales,
        up.stride(0),
        out.stride(0),
        hidden,
        channels,
        E4M3_MAX,
        TINY,
        FIRST=first,
        SECOND=second,
        FIRST_ATTENDED=first_attended,
        SECOND_ATTENDED=second_attended,
        IS_SCALED=attended_scale is not None,
        QUANTIZE=scales is not None,
        num_warps=16 if first > 8192 else 8 if first > 2048 else 4,
    )
