"""A 3 x 3 convolution as a matmul over shifted rows, an implicit GEMM: in e4m3, for which PyTorch has none, or in bf16.

An image is rows of pixels, (pixels, channels). A neighbour of all pixels is then the same rows, read a few rows earlier
or later, so a convolution is nine matmuls whose left factors differ in where they start. At an image's edges the
neighbour has to be zero: each line of pixels ends with one of zeros, which is also before the next line's first pixel,
and each image with a line of zeros. These cost 1/64 more rows in lines of 64 pixels. What lies before the first and
after the last row is zero to the tensor memory accelerator (TMA), which copies the tiles.

A convolution of an image that is enlarged twofold, each pixel to four equal ones, reads only four different pixels for
each of its own: of the nine weights those that meet the same pixel are added beforehand. So it is four convolutions of
2 x 2 pixels of the small image, one for each place within the four, and 4/9 of the work; the large one is never made.

Deep layers have few pixels and many channels, so few tiles: there the sum over channels and neighbours is split between
programs, whose partial sums a second kernel adds, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vivace.machinery.kernels.convolution_tiles import Tiles, choose
from vivace.machinery.kernels.reference import PaddedImages, side_and_scale


@triton.jit
def _store(
    sums,
    column,
    row,
    inside,
    scales,
    bias,
    residual,
    out,
    channels,
    split,
    num_pixels,
    WIDTH: tl.constexpr,
    PARTIAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    channel = column + tl.arange(0, WIDTH)
    exists = channel < channels
    valid = inside[:, None] & exists[None, :]
    at = row.to(tl.int64)[:, None] * channels + channel[None, :]
    if PARTIAL:
        tl.store(out + (split * num_pixels).to(tl.int64) * channels + at, sums, mask=valid)
    else:
        value = sums * tl.load(scales + channel, mask=exists, other=0.0)[None, :]
        if HAS_BIAS:
            value += tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)[None, :]
        if HAS_RESIDUAL:
            value += tl.load(residual + at, mask=valid, other=0.0).to(tl.float32)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=valid)


# Sizes are not compiled in, so that another shape is not another kernel.
@triton.jit(do_not_specialize=["batch", "height", "width", "num_columns", "num_blocks", "steps"])
def _convolve(
    x,
    weight,
    more_weight,
    scales,
    bias,
    residual,
    out,
    batch,
    height,
    width,
    channels,
    num_columns,
    num_blocks,
    steps,
    SIDE: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    MAIN: tl.constexpr,
    EXTRA: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTIAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    tile, split, place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tile // num_columns * ROWS
    column = tile % num_columns * (MAIN + EXTRA)
    sums = tl.zeros([ROWS, MAIN], tl.float32)
    if EXTRA:
        more_sums = tl.zeros([ROWS, EXTRA], tl.float32)
    for index in tl.range(0, steps, num_stages=STAGES):
        step = split * steps + index
        neighbour = step // num_blocks
        # Steps of the last program beyond the last neighbour read channels that do not exist, as zeros.
        channel = tl.where(neighbour < SIDE * SIDE, step % num_blocks, num_blocks) * BLOCK
        down, right = neighbour // SIDE - 1, neighbour % SIDE - 1
        if SCALE == 2:
            down += place // 2
            right += place % 2
        pixels = x.load([first + down * (width + 1) + right, channel])
        plane = place * (SIDE * SIDE) + neighbour
        weights = weight.load([plane, column, channel]).reshape(MAIN, BLOCK)
        sums = tl.dot(pixels, weights.T, sums)
        if EXTRA:
            more = more_weight.load([plane, column + MAIN, channel]).reshape(EXTRA, BLOCK)
            more_sums = tl.dot(pixels, more.T, more_sums)
    padded = first + tl.arange(0, ROWS)
    image, y, at = (
        padded // (width + 1) // (height + 1),
        padded // (width + 1) % (height + 1),
        padded % (width + 1),
    )
    inside = (image < batch) & (y < height) & (at < width)
    row = ((image * height + y) * SCALE + place // SCALE) * (width * SCALE) + at * SCALE + place % SCALE
    num_pixels = batch * height * width * (SCALE * SCALE)
    _store(
        sums, column, row, inside, scales, bias, residual, out, channels, split, num_pixels,
        MAIN, PARTIAL, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip
    if EXTRA:
        _store(
            more_sums, column + MAIN, row, inside, scales, bias, residual, out, channels, split, num_pixels,
            EXTRA, PARTIAL, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "splits"])
def _add_parts(
    parts,
    scales,
    bias,
    residual,
    out,
    rows,
    channels,
    splits,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (channel < channels)[None, :]
    at = row.to(tl.int64)[:, None] * channels + channel[None, :]
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for split in range(splits):
        sums += tl.load(parts + (split * rows).to(tl.int64) * channels + at, mask=inside, other=0.0)
    _store(
        sums, tl.program_id(1) * BLOCK, row, row < rows, scales, bias, residual, out, channels, 0, 0,
        BLOCK, False, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


def convolve(
    x: PaddedImages,
    weight: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    tiles: Tiles | None = None,
) -> None:
    """Write scales * conv(x, weight) + bias + residual to `out`, or the convolution of `x` enlarged twofold.

    Args:
        x: channels in multiples of 16 bytes.
        weight: (9, output channels, input channels), of `x`'s dtype, contiguous; of an enlarged image (16, ...), as
            `reference.enlarging` makes it.
        scales: (output channels,), fp32, of weight and input together.
        out, residual: (batch * height * width, output channels), contiguous; of an enlarged image four times as many.
        bias: (output channels,).
        tiles: None: chosen by size.
    """
    planes, channels, inputs = weight.shape
    side, scale = side_and_scale(planes)
    if tiles is None:
        tiles = choose(x, weight)
    assert inputs * x.rows.element_size() % 16 == 0
    columns = triton.cdiv(channels, tiles.channels)
    num_blocks = triton.cdiv(inputs, tiles.block)
    steps = triton.cdiv(side * side * num_blocks, tiles.splits)
    splits = triton.cdiv(side * side * num_blocks, steps)
    is_partial = splits > 1
    made = out if not is_partial else out.new_empty((splits, *out.shape), dtype=torch.float32)
    grid = (triton.cdiv(x.num_needed_rows, tiles.rows) * columns, splits, scale * scale)
    has = {"HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None}
    operands = (scales, bias if bias is not None else scales, residual if residual is not None else out)
    strides = [channels * inputs, inputs, 1]
    by_columns = [
        TensorDescriptor(weight, list(weight.shape), strides, [1, width, tiles.block])
        for width in (tiles.main, tiles.extra or 16)
    ]
    _convolve[grid](
        TensorDescriptor(x.rows, list(x.rows.shape), [inputs, 1], [tiles.rows, tiles.block]),
        *by_columns,
        *operands,
        made,
        x.batch,
        x.height,
        x.width,
        channels,
        columns,
        num_blocks,
        steps,
        SIDE=side,
        SCALE=scale,
        ROWS=tiles.rows,
        MAIN=tiles.main,
        EXTRA=tiles.extra,
        BLOCK=tiles.block,
        PARTIAL=is_partial,
        **has,
        STAGES=tiles.stages,
        num_warps=8,
    )
    if is_partial:
        rows = len(out)
        _add_parts[(triton.cdiv(rows, 8), triton.cdiv(channels, 256))](
            made, *operands, out, rows, channels, splits, ROWS=8, BLOCK=256, **has, num_warps=4
        )


_ELEMENTS_OF_A_SUM = 4096


# The number of rows is not compiled in, so that another size of an image is not another kernel.
@triton.jit(do_not_specialize=["rows"])
def _add(
    x,
    y,
    bias,
    out,
    rows,
    channels,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    inside = (row < rows)[:, None] & exists[None, :]
    at = row.to(tl.int64)[:, None] * channels + channel[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def add_biased(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    """Write x + y + bias to `out`, in one pass: all (rows, channels) and contiguous, but bias, (channels,)."""
    rows, channels = x.shape
    block = min(triton.next_power_of_2(channels), 512)
    together = max(_ELEMENTS_OF_A_SUM // block, 1)
    _add[(triton.cdiv(rows, together), triton.cdiv(channels, block))](
        x, y, bias, out, rows, channels, ROWS=together, BLOCK=block, num_warps=4
    )
