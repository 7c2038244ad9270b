"""Residual, gate, RMSNorm of the branch, RMSNorm of the sum and quantisation of a token, in one pass over it.

Z-Image's blocks normalise what they add as well as what they read. As in `vivace.machinery.kernels.norm_modulate`, a
program holds whole tokens, and the scale of an e4m3 output is known before. A norm's weight, and the scale or gate that
multiplies it, are one vector.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vivace.machinery.kernels.reference import two_blocks

_WARPS = 4


@triton.jit
def _loaded(x, y, row_scale, at, inside, HAS_Y: tl.constexpr, HAS_ROW_SCALES: tl.constexpr):
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    change = value
    if HAS_Y:
        change = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_ROW_SCALES:
            change = change * row_scale[:, None]
    return value, change


@triton.jit
def _vector(vectors, start, channel, exists):
    return tl.load(vectors + start + channel, mask=exists, other=0.0).to(tl.float32)[None, :]


# The number of tokens is not compiled in, so that another size of an image is not another kernel.
@triton.jit(do_not_specialize=["length"])
def _rms_residual(
    x,
    y,
    row_scales,
    vectors,
    out,
    out_scale,
    length,
    vectors_stride,
    out_stride,
    gate_start,
    weight_start,
    channels,
    eps,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    HAS_Y: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    QUANTIZE: tl.constexpr,
    NORM: tl.constexpr,
) -> None:
    # All rows of a program are of one image, so vectors are read once for them.
    first = tl.program_id(0) * ROWS
    own = vectors + (first // length).to(tl.int64) * vectors_stride
    row = first + tl.arange(0, ROWS)
    start = row.to(tl.int64)[:, None] * channels
    row_scale = tl.load(row_scales + row) if HAS_ROW_SCALES else row
    channel = tl.arange(0, FIRST)
    exists = channel < channels
    inside = exists[None, :] & (row >= 0)[:, None]
    at = start + channel[None, :]
    value, change = _loaded(x, y, row_scale, at, inside, HAS_Y, HAS_ROW_SCALES)
    if SECOND:
        later = FIRST + tl.arange(0, SECOND)
        there = later < channels
        within = there[None, :] & (row >= 0)[:, None]
        to = start + later[None, :]
        rest, rest_change = _loaded(x, y, row_scale, to, within, HAS_Y, HAS_ROW_SCALES)
    if HAS_Y:
        squares = tl.sum(change * change, axis=1)
        if SECOND:
            squares += tl.sum(rest_change * rest_change, axis=1)
        inverse = (1.0 / tl.sqrt(squares / channels + eps))[:, None]
        # Rounded as it will be stored, so that the norm sees what the next block will.
        value += change * inverse * _vector(own, gate_start, channel, exists)
        value = value.to(x.dtype.element_ty).to(tl.float32)
        if SECOND:
            rest += rest_change * inverse * _vector(own, gate_start, later, there)
            rest = rest.to(x.dtype.element_ty).to(tl.float32)
        # Where a block has fewer elements than the program has threads, several warps hold the same element, and one of
        # them stores it. None may store before all have loaded: a late one would add the branch a second time.
        tl.debug_barrier()
        tl.store(x + at, value.to(x.dtype.element_ty), mask=inside)
        if SECOND:
            tl.store(x + to, rest.to(x.dtype.element_ty), mask=within)
    if NORM:
        squares = tl.sum(value * value, axis=1)
        if SECOND:
            squares += tl.sum(rest * rest, axis=1)
        by = (1.0 / tl.sqrt(squares / channels + eps))[:, None]
        if QUANTIZE:
            by = by / tl.load(out_scale)
        of_row = out + row.to(tl.int64)[:, None] * out_stride
        normed = value * by * _vector(own, weight_start, channel, exists)
        tl.store(
            of_row + channel[None, :], normed.to(out.dtype.element_ty), mask=inside
        )  # the cast saturates
        if SECOND:
            normed = rest * by * _vector(own, weight_start, later, there)
            tl.store(of_row + later[None, :], normed.to(out.dtype.element_ty), mask=within)


def rms_residual(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    row_scales: torch.Tensor | None,
    vectors: torch.Tensor,
    gate: int,
    weight: int,
    out: torch.Tensor | None,
    scale: torch.Tensor | None,
    eps: float,
) -> None:
    """Add the norm of a branch to `x` in place, and write the norm of the sum to `out`.

    Args:
        x: (rows, channels), the residual stream: the same number of rows for each image.
        branch: (rows, channels); None: nothing is added.
        row_scales: (rows,), fp32, by which the branch's rows are multiplied; None: one.
        vectors: (images, all vectors), of which those of the gate and of the norm's weight start at `gate`, `weight`.
        out: (rows, channels), which may be part of wider rows; e4m3 if `scale` is given, else x's dtype. None: nothing
            is normalised.
        scale: (1,), fp32, by which an e4m3 `out` is divided.
    """
    rows, channels = x.shape
    length = rows // len(vectors)
    together = 2 if length % 2 == 0 else 1
    first, second = two_blocks(channels)
    _rms_residual[(rows // together,)](
        x,
        branch if branch is not None else x,
        row_scales if row_scales is not None else x,
        vectors,
        out if out is not None else x,
        scale if scale is not None else x,
        length,
        vectors.stride(0),
        out.stride(0) if out is not None else 0,
        gate,
        weight,
        channels,
        eps,
        ROWS=together,
        FIRST=first,
        SECOND=second,
        HAS_Y=branch is not None,
        HAS_ROW_SCALES=row_scales is not None,
        QUANTIZE=scale is not None,
        NORM=out is not None,
        num_warps=_WARPS,
    )
