"""GroupNorm of channels-last activations, with what comes before and after it, in two passes over memory.

PyTorch's GroupNorm, the addition of the time embedding before it and SiLU after it are four kernels, and read or write
the activations seven times. Here they are read twice and written once: a first kernel takes each channel's mean and
squared deviations over chunks of pixels, a small one combines them to a factor and a shift for each channel, and the
last one applies these and SiLU. Chunks are combined as Chan et al. do (Updating Formulae and a Pairwise Algorithm for
Computing Sample Variances, 1979), so a mean that is large beside the deviations costs no digits.

The output is pixels in bf16, or what a convolution in e4m3 reads: padded images (see `convolution`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vivace.machinery.kernels.reference import PaddedImages

_PROGRAMS = 512  # that take the moments: several for each of a GPU's multiprocessors
_MIN_PIXELS = 16  # of a chunk
_ELEMENTS = 4096  # that a program holds at a time
_MEASURED, _APPLIED = 64, 128
"""Channels of a program. They divide five times a power of two, which UNets have, without leaving threads idle."""
_SMALL = 16384
"""Elements of a group, pixels and channels rounded up to powers of two, up to which one kernel is faster on an H100
(results/unet-kernels.jsonl)."""


# Sizes of images are not compiled in, so that another size is not another kernel. That addresses can be
# divided by 16 is known by the channels.
@triton.jit(do_not_specialize=["pixels", "num_chunks", "chunk"])
def _moments(
    x,
    means,
    deviations,
    pixels,
    channels,
    chunk,
    num_chunks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    part, image = tl.program_id(0), tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    first = part * chunk
    last = tl.minimum(first + chunk, pixels)
    base = x + image.to(tl.int64) * pixels * channels
    # Deviations from a first pixel are summed, so that nothing cancels if the mean is large.
    origin = tl.load(base + first.to(tl.int64) * channels + channel, mask=exists, other=0.0).to(tl.float32)
    totals = tl.zeros([ROWS, BLOCK], tl.float32)
    all_squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, chunk, ROWS):
        row = first + start + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & exists[None, :]
        at = row.to(tl.int64)[:, None] * channels + channel[None, :]
        value = tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - origin[None, :], 0.0)
        totals += value
        all_squares += value * value
    total, squares = tl.sum(totals, axis=0), tl.sum(all_squares, axis=0)
    count = (last - first).to(tl.float32)
    shift = total / count
    to = (image * num_chunks + part) * channels + channel
    tl.store(means + to, origin + shift, mask=exists)
    tl.store(deviations + to, squares - total * shift, mask=exists)


@triton.jit(do_not_specialize=["pixels", "chunk", "num_chunks"])
def _factors(
    means,
    deviations,
    weight,
    bias,
    added,
    factors,
    pixels,
    channels,
    chunk,
    num_chunks,
    per_group,
    added_stride,
    eps,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_ADDED: tl.constexpr,
) -> None:
    group, image = tl.program_id(0), tl.program_id(1)
    within = tl.arange(0, BLOCK)
    exists = within < per_group
    channel = group * per_group + within
    part = tl.arange(0, CHUNKS)
    inside = (part < num_chunks)[:, None] & exists[None, :]
    at = (image * num_chunks + part)[:, None] * channels + channel[None, :]
    own = tl.zeros([BLOCK], tl.float32)
    if HAS_ADDED:
        own = tl.load(added + image * added_stride + channel, mask=exists, other=0.0).to(tl.float32)
    mean = tl.load(means + at, mask=inside, other=0.0) + own[None, :]
    count = tl.minimum(pixels - part * chunk, chunk).to(tl.float32)[:, None]
    count = tl.where(inside, count, 0.0)
    number = (pixels * per_group).to(tl.float32)
    # Relative to one channel's mean, for the same reason as above.
    origin = tl.sum(tl.where((part == 0)[:, None] & (within == 0)[None, :], mean, 0.0))
    middle = origin + tl.sum(count * (mean - origin)) / number
    spread = tl.sum(tl.load(deviations + at, mask=inside, other=0.0))
    spread += tl.sum(count * (mean - middle) * (mean - middle))
    inverse = 1.0 / tl.sqrt(spread / number + eps)
    factor = tl.load(weight + channel, mask=exists, other=0.0).to(tl.float32) * inverse
    shift = tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32) + (own - middle) * factor
    to = factors + image * 2 * channels + channel
    tl.store(to, factor, mask=exists)
    tl.store(to + channels, shift, mask=exists)


@triton.jit
def _finish(
    value,
    out,
    scale,
    image,
    row,
    channel,
    exists,
    pixels,
    channels,
    width,
    out_stride,
    SILU: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_SCALE: tl.constexpr,
) -> None:
    """Store pixels of an image, or SiLU of them; of a padded one also as many rows of its padding, from the first.

    `exists` tells which of the channels are this program's.
    """
    inside = (row < pixels)[:, None] & exists[None, :]
    if SILU:
        value = value * tl.sigmoid(value)
    if HAS_SCALE:
        value = value * (1.0 / tl.load(scale))  # the cast saturates
    if PADDED:
        height = pixels // width
        first = image.to(tl.int64) * (height + 1) * (width + 1)
        at = (first + row + row // width)[:, None] * out_stride + channel[None, :]
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
        # After each line, then the line below.
        at = tl.where(row < height, row * (width + 1) + width, height * width + row)
        zeros = tl.zeros_like(value).to(out.dtype.element_ty)
        is_padding = (row < height + width + 1)[:, None] & exists[None, :]
        tl.store(out + (first + at)[:, None] * out_stride + channel[None, :], zeros, mask=is_padding)
    else:
        at = (image.to(tl.int64) * pixels + row)[:, None] * out_stride + channel[None, :]
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["pixels", "width"])
def _apply(
    x,
    factors,
    out,
    scale,
    pixels,
    channels,
    width,
    out_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_SCALE: tl.constexpr,
) -> None:
    image = tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = channel < channels
    inside = (row < pixels)[:, None] & exists[None, :]
    own = factors + image * 2 * channels + channel
    factor = tl.load(own, mask=exists, other=0.0)
    shift = tl.load(own + channels, mask=exists, other=0.0)
    at = (image.to(tl.int64) * pixels + row)[:, None] * channels + channel[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value = value * factor[None, :] + shift[None, :]
    _finish(
        value,
        out,
        scale,
        image,
        row,
        channel,
        exists,
        pixels,
        channels,
        width,
        out_stride,
        SILU,
        PADDED,
        HAS_SCALE,
    )


@triton.jit(do_not_specialize=["pixels", "width"])
def _whole_group(
    x,
    out,
    weight,
    bias,
    added,
    scale,
    pixels,
    channels,
    width,
    out_stride,
    per_group,
    added_stride,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    SILU: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_SCALE: tl.constexpr,
) -> None:
    group, image = tl.program_id(0), tl.program_id(1)
    within = tl.arange(0, BLOCK)
    exists = within < per_group
    channel = group * per_group + within
    row = tl.arange(0, ROWS)
    inside = (row < pixels)[:, None] & exists[None, :]
    at = image.to(tl.int64) * pixels * channels + row[:, None] * channels + channel[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_ADDED:
        own = tl.load(added + image * added_stride + channel, mask=exists, other=0.0).to(tl.float32)
        value += own[None, :]
    number = (pixels * per_group).to(tl.float32)
    # Twice, so that no digits are lost: the first mean only has to be near.
    near = tl.sum(tl.where(inside, value, 0.0)) / number
    value = tl.where(inside, value - near, 0.0)
    value -= tl.sum(value) / number
    spread = tl.sum(tl.where(inside, value * value, 0.0))
    factor = tl.load(weight + channel, mask=exists, other=0.0).to(tl.float32)
    factor = factor / tl.sqrt(spread / number + eps)
    shift = tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)
    value = value * factor[None, :] + shift[None, :]
    _finish(
        value,
        out,
        scale,
        image,
        row,
        channel,
        exists,
        pixels,
        channels,
        width,
        out_stride,
        SILU,
        PADDED,
        HAS_SCALE,
    )


def group_norm(
    x: torch.Tensor,
    out: torch.Tensor | PaddedImages,
    num_groups: int,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    added: torch.Tensor | None,
    silu: bool,
    small: int = _SMALL,
    scale: torch.Tensor | None = None,
) -> None:
    """Write GroupNorm(x + added), or SiLU of it, to `out`.

    Args:
        x: (batch, pixels, channels), contiguous.
        out: the same, whose pixels may be part of wider rows; or padded images.
        weight, bias: (channels,).
        added: (batch, channels), for all pixels of an image; None: nothing.
        scale: (1,), fp32, by which the output is divided; None: that of padded images, if they have one.
        small: the most elements of a group, rounded up to powers of two, that take one kernel.
    """
    batch, pixels, channels = x.shape
    per_group = channels // num_groups
    group_block = triton.next_power_of_2(per_group)
    padded = out if isinstance(out, PaddedImages) else None
    if isinstance(out, PaddedImages):
        onto, width, out_stride = out.rows, out.width, channels
        scale = scale if scale is not None else out.scale
        to_cover = max(pixels, out.height + out.width + 1)  # also the padding
    else:
        onto, width, to_cover, out_stride = out, pixels, pixels, out.stride(1)
    size = triton.next_power_of_2(to_cover)
    if size * group_block <= small:
        _whole_group[(num_groups, batch)](
            x,
            onto,
            weight,
            bias,
            added if added is not None else x,
            scale if scale is not None else weight,
            pixels,
            channels,
            width,
            out_stride,
            per_group,
            added.stride(0) if added is not None else 0,
            eps,
            ROWS=size,
            BLOCK=group_block,
            HAS_ADDED=added is not None,
            SILU=silu,
            PADDED=padded is not None,
            HAS_SCALE=scale is not None,
            num_warps=min(max(size * group_block // 1024, 1), 16),
        )
        return
    block = min(triton.next_power_of_2(channels), _MEASURED)
    columns = triton.cdiv(channels, block)
    # At most, and of how many pixels each.
    chunks = max(_PROGRAMS // (batch * columns), 1)
    chunk = max(triton.next_power_of_2(triton.cdiv(pixels, chunks)), _MIN_PIXELS)
    num_chunks = triton.cdiv(pixels, chunk)
    means, deviations = x.new_empty((2, batch, num_chunks, channels), dtype=torch.float32).unbind(0)
    factors = x.new_empty((batch, 2, channels), dtype=torch.float32)
    rows = min(_ELEMENTS // block, chunk)
    _moments[(num_chunks, batch, columns)](
        x, means, deviations, pixels, channels, chunk, num_chunks, ROWS=rows, BLOCK=block, num_warps=4
    )
    _factors[(num_groups, batch)](
        means,
        deviations,
        weight,
        bias,
        added if added is not None else x,
        factors,
        pixels,
        channels,
        chunk,
        num_chunks,
        per_group,
        added.stride(0) if added is not None else 0,
        eps,
        CHUNKS=triton.next_power_of_2(chunks),
        BLOCK=group_block,
        HAS_ADDED=added is not None,
        num_warps=8,
    )
    block = min(triton.next_power_of_2(channels), _APPLIED)
    rows = _ELEMENTS // block
    _apply[(triton.cdiv(to_cover, rows), batch, triton.cdiv(channels, block))](
        x,
        factors,
        onto,
        scale if scale is not None else weight,
        pixels,
        channels,
        width,
        out_stride,
        ROWS=rows,
        BLOCK=block,
        SILU=silu,
        PADDED=padded is not None,
        HAS_SCALE=scale is not None,
        num_warps=4,
    )
