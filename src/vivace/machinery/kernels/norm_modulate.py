"""Residual, gate, LayerNorm, modulation and quantisation of a token, in one pass over it.

In PyTorch's operators these are six passes: the gated branch is added to the stream, mean and variance are reduced, the
normalised token is scaled and shifted, and it is divided and rounded. Each is bound by memory. Here one program keeps
two tokens (of 3,072 channels in FLUX) in registers: it reads the stream and the branch, and writes the stream and the
input of the next matmul. The scale of that input is known before: see `vivace.machinery.fused.scales`. A row is held as
two blocks, since UNets have five times a power of two channels, and FLUX three times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vivace.machinery.kernels.reference import Branch, Modulation, TokenLayout, two_blocks

_WARPS = 4
_FEW_CHANNELS, _MANY_ROWS = 1280, 1792
"""Of up to so many channels, and from so many rows on, a program takes four tokens: two would leave it little to do.
SDXL's deepest layers have 1,920 rows or more at every size of a megapixel."""


@triton.jit
def _with_branch(
    x,
    y,
    bias,
    gate,
    row_scale,
    at,
    channel,
    inside,
    exists,
    HAS_Y: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
):
    """Load the stream, and add the branch. Nothing is stored yet: see `_residual_norm`."""
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_Y:
        change = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_ROW_SCALES:
            change = change * row_scale[:, None]
        if HAS_BIAS:
            change += tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)[None, :]
        by = tl.load(gate + channel, mask=exists, other=0.0).to(tl.float32)
        # Rounded as it will be stored, so that the norm sees what the next block will.
        value = (value + by[None, :] * change).to(x.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def _modulate(normed, scale, shift, by, out, at, channel, inside, exists):
    scale = tl.load(scale + channel, mask=exists, other=0.0).to(tl.float32)
    shift = tl.load(shift + channel, mask=exists, other=0.0).to(tl.float32)
    value = (normed * (1.0 + scale)[None, :] + shift[None, :]) * by
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)  # the cast to e4m3 saturates


# Numbers of tokens are not compiled in, so that another size of an image is not another kernel.
@triton.jit(do_not_specialize=["num_text_rows", "text", "image"])
def _residual_norm(
    x,
    y,
    bias,
    row_scales,
    modulations,
    out,
    out_scale,
    num_text_rows,
    text,
    image,
    row_modulations,
    bias_stride,
    scale_stride,
    out_stride,
    gate_text,
    gate_image,
    shift_text,
    shift_image,
    scale_text,
    scale_image,
    channels,
    eps,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    HAS_Y: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    QUANTIZE: tl.constexpr,
    NORM: tl.constexpr,
    CENTRE: tl.constexpr,
) -> None:
    # All rows of a program are of one stream and one batch row, so modulations are read once for them.
    first = tl.program_id(0) * ROWS
    is_image = first >= num_text_rows
    stream = is_image.to(tl.int32)
    batch = tl.where(is_image, (first - num_text_rows) // tl.maximum(image, 1), first // tl.maximum(text, 1))
    own = modulations + batch.to(tl.int64) * row_modulations
    gate = own + tl.where(is_image, gate_image, gate_text)
    bias += stream * bias_stride
    row = first + tl.arange(0, ROWS)
    start = row.to(tl.int64)[:, None] * channels
    row_scale = tl.load(row_scales + row) if HAS_ROW_SCALES else row
    channel = tl.arange(0, FIRST)
    exists = channel < channels
    inside = exists[None, :] & (row >= 0)[:, None]
    at = start + channel[None, :]
    value = _with_branch(
        x, y, bias, gate, row_scale, at, channel, inside, exists, HAS_Y, HAS_BIAS, HAS_ROW_SCALES
    )
    if SECOND:
        later = FIRST + tl.arange(0, SECOND)
        there = later < channels
        within = there[None, :] & (row >= 0)[:, None]
        to = start + later[None, :]
        rest = _with_branch(
            x, y, bias, gate, row_scale, to, later, within, there, HAS_Y, HAS_BIAS, HAS_ROW_SCALES
        )
    if HAS_Y:
        # Where a block has fewer elements than the program has threads, several warps hold the same element, and one of
        # them stores it. None may store before all have loaded: a late one would add the branch a second time.
        tl.debug_barrier()
        tl.store(x + at, value.to(x.dtype.element_ty), mask=inside)
        if SECOND:
            tl.store(x + to, rest.to(x.dtype.element_ty), mask=within)
    if NORM:
        if CENTRE:
            total = tl.sum(value, axis=1)
            if SECOND:
                total += tl.sum(rest, axis=1)
            mean = (total / channels)[:, None]
            value = tl.where(inside, value - mean, 0.0)
            if SECOND:
                rest = tl.where(within, rest - mean, 0.0)
        squares = tl.sum(value * value, axis=1)
        if SECOND:
            squares += tl.sum(rest * rest, axis=1)
        inverse = (1.0 / tl.sqrt(squares / channels + eps))[:, None]
        by = 1.0
        if QUANTIZE:
            by = 1.0 / tl.load(out_scale + stream * scale_stride)
        scale = own + tl.where(is_image, scale_image, scale_text)
        shift = own + tl.where(is_image, shift_image, shift_text)
        of_row = row.to(tl.int64)[:, None] * out_stride
        _modulate(value * inverse, scale, shift, by, out, of_row + channel[None, :], channel, inside, exists)
        if SECOND:
            _modulate(rest * inverse, scale, shift, by, out, of_row + later[None, :], later, within, there)


def residual_norm(
    x: torch.Tensor,
    branch: Branch | None,
    modulations: torch.Tensor,
    norm: tuple[Modulation, Modulation] | None,
    tokens: TokenLayout,
    out: torch.Tensor | None,
    scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    centred: bool = True,
) -> None:
    """Add the branch to `x` in place, and write its norm, modulated, to `out`.

    Args:
        x: (rows, channels), the residual stream.
        branch: None: nothing is added.
        modulations: (batch, all modulations); the branch's gate and `norm` (shift, scale) say where theirs start.
        out: (rows, channels), which may be part of wider rows; e4m3 if `scale` is given, else x's dtype. None with
            `norm`: nothing is normalised.
        scale: (1 or 2,), fp32, by which an e4m3 `out` is divided: of all rows, or of the text's and the image's.
        centred: the norm is LayerNorm; else RMSNorm.
    """
    rows, channels = x.shape
    shift_at, scale_at = norm if norm is not None else (Modulation(0, 0), Modulation(0, 0))
    gate = branch.gate if branch is not None else Modulation(0, 0)
    bias = branch.bias if branch is not None else None
    row_scales = branch.row_scales if branch is not None else None
    most = 4 if channels <= _FEW_CHANNELS and rows >= _MANY_ROWS else 2
    together = next(k for k in (4, 2, 1) if k <= most and not (tokens.text % k or tokens.image % k))
    first, second = two_blocks(channels)
    _residual_norm[(rows // together,)](
        x,
        branch.values if branch is not None else x,
        bias if bias is not None else x,
        row_scales if row_scales is not None else x,
        modulations,
        out if out is not None else x,
        scale if scale is not None else x,
        tokens.num_text_rows,
        tokens.text,
        tokens.image,
        modulations.stride(0),
        channels if bias is not None and bias.shape[0] > 1 else 0,
        scale.stride(0) if scale is not None and len(scale) > 1 else 0,
        out.stride(0) if out is not None else 0,
        gate.text,
        gate.image,
        shift_at.text,
        shift_at.image,
        scale_at.text,
        scale_at.image,
        channels,
        eps,
        ROWS=together,
        FIRST=first,
        SECOND=second,
        HAS_Y=branch is not None,
        HAS_BIAS=bias is not None,
        HAS_ROW_SCALES=row_scales is not None,
        QUANTIZE=scale is not None,
        NORM=norm is not None,
        CENTRE=centred,
        num_warps=_WARPS,
    )
