"""GroupNorm of channels-last activations, with what comes before and after it, in one kernel.

PyTorch's GroupNorm, the addition of the time embedding before it and SiLU after it are four kernels, and read or write
the activations seven times. Here they are read twice and written once. A program takes some groups of an image and a
part of its pixels: first each channel's mean and squared deviations over them. Then it waits for the programs that take
the same groups' other pixels, combines what all of them have found, and normalises its own pixels, which are still in
the caches. Parts are combined as Chan et al. do (Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances, 1979), so a mean that is large beside the deviations costs no digits.

Programs that wait for each other have to run at the same time: there are no more of them than multiprocessors, and the
launch is a cooperative one, for which CUDA sees to it. Small groups are one program's each, which then waits for none.

The output is pixels in bf16, or what a convolution in e4m3 reads: padded images (`vivace.kernels.convolution`).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from vivace.kernels.reference import PaddedImages

_CHANNELS = 64
"""Of a program, at least, where there are as many: pixels are then read in whole lines of the cache."""
_ELEMENTS = 16384  # that a program holds at a time
_PARTS = tl.constexpr(16)  # that are combined at a time
_SMALL = 16384
"""Elements of a group, pixels and channels rounded up to powers of two, up to which a program takes a whole one; this
is faster on an H100 (results/unet-kernels.jsonl)."""
_WITHOUT_WAITING = 8
"""Programs where there is no GPU. The interpreter runs one after the other, so none may wait: it takes two kernels."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _finish(  # type: ignore[no-untyped-def]
    value,
    out,
    scale,
    image,
    row,
    end,
    channel,
    exists,
    pixels,
    channels,
    width,
    SILU: tl.constexpr,  # noqa: N803
    PADDED: tl.constexpr,  # noqa: N803
    HAS_SCALE: tl.constexpr,  # noqa: N803
) -> None:
    """Store pixels of an image, or SiLU of them; of a padded one also as many rows of its padding, from the first.

    Rows before `end`, and channels that exist, are this program's.
    """
    own = (row < end)[:, None] & exists[None, :]
    inside = own & (row < pixels)[:, None]
    if SILU:
        value = value * tl.sigmoid(value)
    if PADDED:
        if HAS_SCALE:
            value = value * (1.0 / tl.load(scale))  # the cast saturates
        height = pixels // width
        first = image.to(tl.int64) * (height + 1) * (width + 1)
        at = (first + row + row // width)[:, None] * channels + channel[None, :]
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
        # After each line, then the line below.
        at = tl.where(row < height, row * (width + 1) + width, height * width + row)
        zeros = tl.zeros_like(value).to(out.dtype.element_ty)
        is_padding = own & (row < height + width + 1)[:, None]
        tl.store(out + (first + at)[:, None] * channels + channel[None, :], zeros, mask=is_padding)
    else:
        at = (image.to(tl.int64) * pixels + row)[:, None] * channels + channel[None, :]
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _wait(barrier, number):  # type: ignore[no-untyped-def]
    """Wait for as many programs as come here; what each has written can then be read by all.

    `barrier` holds how many have come, which the last one sets back to 0, and how often that has happened.
    """
    round_ = tl.atomic_add(barrier + 1, 0)
    tl.debug_barrier()  # all threads have written
    if tl.atomic_add(barrier, 1) == number - 1:
        tl.atomic_xchg(barrier, 0)
        tl.atomic_add(barrier + 1, 1)
    else:
        while tl.atomic_add(barrier + 1, 0) == round_:
            pass
    tl.debug_barrier()


@triton.jit(do_not_specialize=["pixels", "to_cover", "part_pixels", "num_parts"])  # type: ignore[untyped-decorator, unused-ignore]
def _normalise(  # type: ignore[no-untyped-def]
    x,
    out,
    weight,
    bias,
    added,
    scale,
    means,
    deviations,
    barriers,
    pixels,
    channels,
    width,
    to_cover,
    part_pixels,
    num_parts,
    added_stride,
    eps,
    OWN: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    MEASURES: tl.constexpr,  # noqa: N803
    APPLIES: tl.constexpr,  # noqa: N803
    WAITS: tl.constexpr,  # noqa: N803
    HAS_ADDED: tl.constexpr,  # noqa: N803
    SILU: tl.constexpr,  # noqa: N803
    PADDED: tl.constexpr,  # noqa: N803
    HAS_SCALE: tl.constexpr,  # noqa: N803
) -> None:
    part, groups, image = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    within = tl.arange(0, BLOCK)
    exists = within < OWN
    channel = groups * OWN + within
    first = part * part_pixels
    end = first + part_pixels
    base = x + image.to(tl.int64) * pixels * channels
    found = image * num_parts * channels + channel  # of the first part
    if MEASURES:
        last = tl.minimum(end, pixels)
        # Deviations from a first pixel are summed, so that nothing cancels if the mean is large.
        start = tl.minimum(first, pixels - 1).to(tl.int64)
        origin = tl.load(base + start * channels + channel, mask=exists, other=0.0).to(tl.float32)
        totals = tl.zeros([ROWS, BLOCK], tl.float32)
        all_squares = tl.zeros([ROWS, BLOCK], tl.float32)
        for from_row in range(first, last, ROWS):
            row = from_row + tl.arange(0, ROWS)
            inside = (row < last)[:, None] & exists[None, :]
            at = row.to(tl.int64)[:, None] * channels + channel[None, :]
            value = tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
            value = tl.where(inside, value - origin[None, :], 0.0)
            totals += value
            all_squares += value * value
        total, squares = tl.sum(totals, axis=0), tl.sum(all_squares, axis=0)
        shift = total / tl.maximum(last - first, 1).to(tl.float32)
        to = found + part * channels
        tl.store(means + to, origin + shift, mask=exists)
        tl.store(deviations + to, squares - total * shift, mask=exists)
    if MEASURES and APPLIES:
        if WAITS:
            _wait(barriers + 2 * (image * tl.num_programs(1) + groups), num_parts)
        else:
            tl.debug_barrier()
    if APPLIES:
        # Past the first-level cache, which does not see what other programs write. Relative to the first part's mean.
        origin = tl.load(means + found, mask=exists, other=0.0, cache_modifier=".cg")
        total = tl.zeros([BLOCK], tl.float32)
        squares = tl.zeros([BLOCK], tl.float32)
        for from_part in range(0, num_parts, _PARTS):
            parts = from_part + tl.arange(0, _PARTS)
            inside = (parts < num_parts)[:, None] & exists[None, :]
            at = found[None, :] + parts[:, None] * channels
            count = tl.minimum(tl.maximum(pixels - parts * part_pixels, 0), part_pixels).to(tl.float32)[
                :, None
            ]
            mean = tl.load(means + at, mask=inside, other=0.0, cache_modifier=".cg")
            mean = tl.where(inside, mean - origin[None, :], 0.0)
            spread = tl.load(deviations + at, mask=inside, other=0.0, cache_modifier=".cg")
            total += tl.sum(count * mean, axis=0)
            squares += tl.sum(spread + count * mean * mean, axis=0)
        number = pixels.to(tl.float32)
        spread = squares - total * total / number
        own = tl.zeros([BLOCK], tl.float32)
        if HAS_ADDED:
            own = tl.load(added + image * added_stride + channel, mask=exists, other=0.0).to(tl.float32)
        mean = origin + total / number + own
        # Each group's mean and variance, and those of each channel's group.
        per_group: tl.constexpr = OWN // GROUPS
        group = tl.arange(0, GROUPS)
        belongs = ((within // per_group)[None, :] == group[:, None]) & exists[None, :]
        middles = tl.sum(tl.where(belongs, mean[None, :], 0.0), axis=1) / per_group
        middle = tl.sum(tl.where(belongs, middles[:, None], 0.0), axis=0)
        spread += number * (mean - middle) * (mean - middle)
        variances = tl.sum(tl.where(belongs, spread[None, :], 0.0), axis=1) / (number * per_group)
        inverses = 1.0 / tl.sqrt(variances + eps)
        factor = tl.load(weight + channel, mask=exists, other=0.0).to(tl.float32)
        factor *= tl.sum(tl.where(belongs, inverses[:, None], 0.0), axis=0)
        shift = tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32) + (own - middle) * factor
        for from_row in range(first, tl.minimum(end, to_cover), ROWS):
            row = from_row + tl.arange(0, ROWS)
            inside = (row < tl.minimum(end, pixels))[:, None] & exists[None, :]
            at = row.to(tl.int64)[:, None] * channels + channel[None, :]
            value = tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
            value = value * factor[None, :] + shift[None, :]
            _finish(
                value, out, scale, image, row, end, channel, exists, pixels, channels, width, SILU, PADDED, HAS_SCALE
            )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _whole_group(  # type: ignore[no-untyped-def]
    x,
    out,
    weight,
    bias,
    added,
    scale,
    pixels,
    channels,
    width,
    per_group,
    added_stride,
    eps,
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    HAS_ADDED: tl.constexpr,  # noqa: N803
    SILU: tl.constexpr,  # noqa: N803
    PADDED: tl.constexpr,  # noqa: N803
    HAS_SCALE: tl.constexpr,  # noqa: N803
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
        value, out, scale, image, row, ROWS, channel, exists, pixels, channels, width, SILU, PADDED, HAS_SCALE
    )  # fmt: skip


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Of a GPU; 0 elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


# One for all norms of a device: they run one after the other on a stream. Graphs captured earlier replay with it.
@functools.cache
def _barriers(device: torch.device) -> torch.Tensor:
    """What programs wait by, (multiprocessors, 2), 0 at first and after each kernel but for the number of waits."""
    return torch.zeros((_multiprocessors(device), 2), dtype=torch.int32, device=device)


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
) -> None:
    """Write GroupNorm(x + added), or SiLU of it, to `out`.

    Args:
        x: (batch, pixels, channels), contiguous.
        out: the same, or padded images, whose values are divided by their scale if they have one.
        weight, bias: (channels,).
        added: (batch, channels), for all pixels of an image; None: nothing.
        small: the most elements of a group, rounded up to powers of two, that are one program's.
    """
    batch, pixels, channels = x.shape
    per_group = channels // num_groups
    group_block = triton.next_power_of_2(per_group)
    padded = out if isinstance(out, PaddedImages) else None
    if padded is None:
        onto, scale, width, to_cover = out, weight, pixels, pixels
    else:
        onto, width = padded.rows, padded.width
        scale = padded.scale if padded.scale is not None else weight
        to_cover = max(pixels, padded.height + padded.width + 1)  # also the padding
    how = {
        "HAS_ADDED": added is not None,
        "SILU": silu,
        "PADDED": padded is not None,
        "HAS_SCALE": padded is not None and padded.scale is not None,
    }
    given = (x, onto, weight, bias, added if added is not None else x, scale)
    added_stride = added.stride(0) if added is not None else 0
    size = triton.next_power_of_2(to_cover)
    if size * group_block <= small:
        _whole_group[(num_groups, batch)](
            *given,
            pixels,
            channels,
            width,
            per_group,
            added_stride,
            eps,
            ROWS=size,
            BLOCK=group_block,
            **how,
            num_warps=min(max(size * group_block // 1024, 1), 16),
        )
        return
    together = _groups_together(num_groups, per_group)
    own = together * per_group
    columns = num_groups // together
    at_a_time = _multiprocessors(x.device)
    num_parts = max(min((at_a_time or _WITHOUT_WAITING) // (batch * columns), to_cover), 1)
    part_pixels = triton.cdiv(to_cover, num_parts)
    num_parts = triton.cdiv(to_cover, part_pixels)
    block = triton.next_power_of_2(own)
    rows = min(triton.next_power_of_2(part_pixels), max(_ELEMENTS // block, 1))
    moments = x.new_empty((2, batch, num_parts, channels), dtype=torch.float32).unbind(0)
    launch = _normalise[(num_parts, columns, batch)]
    waits = num_parts > 1 and at_a_time > 0
    runs = ((True, True),) if waits or num_parts == 1 else ((True, False), (False, True))
    for measures, applies in runs:
        launch(
            *given,
            *moments,
            _barriers(x.device) if waits else x,
            pixels,
            channels,
            width,
            to_cover,
            part_pixels,
            num_parts,
            added_stride,
            eps,
            OWN=own,
            GROUPS=together,
            ROWS=rows,
            BLOCK=block,
            MEASURES=measures,
            APPLIES=applies,
            WAITS=waits,
            **how,
            num_warps=min(max(rows * block // 1024, 4), 16),
            launch_cooperative_grid=waits,
        )


def _groups_together(num_groups: int, per_group: int) -> int:
    """Return how many groups a program takes: a power of two, the least whose channels are at least `_CHANNELS`."""
    together = 1
    while together * per_group < _CHANNELS and num_groups % (2 * together) == 0:
        together *= 2
    return together
