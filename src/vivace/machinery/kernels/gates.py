"""Gated activations, GEGLU and SwiGLU, and attention's gate, with rounding to e4m3, each in one pass.

An activation's bound is the product of two bounds, each of which typical elements are far below: a scale from it would
leave e4m3 too few of its binades. So each row has a scale of its own, from its largest element: a program holds the
row. The next matmul computes with the values alone, since a row's scale can be multiplied into its output, which the
kernel that reads it does.

SwiGLU is written beside attention's output where one matmul takes both: the scale is that of both. If that output is in
e4m3 already, with one scale for all rows, a row's scale is that one times a power of two, so that nothing is rounded
twice but what becomes subnormal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vivace.machinery.kernels.reference import E4M3_MAX, TINY, two_blocks

_MOST_CHANNELS = 2048
"""Of a program of the sigmoid gate."""


@triton.jit
def _geglu_values(
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
    value = _geglu_values(own, bias, channels, at, HAS_BIAS)
    by = 1.0
    if QUANTIZE:
        reached = tl.max(tl.abs(value), axis=0)
    if SECOND:
        more = FIRST + tl.arange(0, SECOND)
        rest = _geglu_values(own, bias, channels, more, HAS_BIAS)
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


@triton.jit
def _sigmoid_gate(
    x,
    gate,
    out,
    scale,
    x_stride,
    gate_stride,
    out_stride,
    channels,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.sigmoid(tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32))
    if SCALED:
        value = value * (1.0 / tl.load(scale))  # the cast saturates
    tl.store(out + row * out_stride + at, value.to(out.dtype.element_ty), mask=inside)


def sigmoid_gate(
    x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor, scale: torch.Tensor | None = None
) -> None:
    """Write sigmoid(gate) x, divided by the first of `scale`, to `out`.

    Args:
        x, gate, out: (rows, channels), whose rows may be part of wider ones.
        scale: (1 or more,), fp32; None: one, as where x and an e4m3 `out` have the same scale.
    """
    rows, channels = x.shape
    block = min(_MOST_CHANNELS, triton.next_power_of_2(channels))
    _sigmoid_gate[(rows, triton.cdiv(channels, block))](
        x,
        gate,
        out,
        x if scale is None else scale,
        x.stride(0),
        gate.stride(0),
        out.stride(0),
        channels,
        SCALED=scale is not None,
        BLOCK=block,
        num_warps=4,
    )
