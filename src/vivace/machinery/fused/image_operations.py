"""The fused operations of UNets and VAEs, whose activations are images: see `vivace.machinery.fused.operations`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import register_flop_formula

from vivace.machinery.fused.operations import Room, RowScaled, row_scaled, takes_kernels
from vivace.machinery.kernels import reference
from vivace.machinery.kernels.reference import PaddedImages

_MOST_CHANNELS = 256
"""Most channels of a head that the kernel for attention to a text can hold."""
# On meta tensors nothing is computed, but what counts operations has to see that there is a convolution, or attention.
_LIBRARY = torch.library.Library("vivace", "FRAGMENT")
_LIBRARY.define("fused_convolution(Tensor rows, Tensor weight, Tensor(a!) out) -> ()")
_LIBRARY.impl("fused_convolution", lambda rows, weight, out: None, "Meta")
_LIBRARY.define("fused_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out) -> ()")
_LIBRARY.impl("fused_attention", lambda q, k, v, out: None, "Meta")


@register_flop_formula(torch.ops.vivace.fused_convolution)
def _num_operations(_: Any, weight: Sequence[int], out: Sequence[int], **__: Any) -> int:
    planes, outputs, inputs = weight
    return 2 * reference.side_and_scale(planes)[0] ** 2 * outputs * inputs * out[0]


@register_flop_formula(torch.ops.vivace.fused_attention)
def _num_operations_of_attention(q: Sequence[int], k: Sequence[int], *_: Any, **__: Any) -> int:
    return 4 * math.prod(q) * k[1]


def geglu(up: torch.Tensor, bias: torch.Tensor | None, quantize: bool, room: Room | None = None) -> RowScaled:
    """Return h GELU(g) of `up` (rows, 2 channels) and its bias (2 channels,), in rows that `room` makes."""
    made = row_scaled(len(up), up.shape[1] // 2, up, quantize, room)
    if takes_kernels(up):
        from vivace.machinery.kernels import gates as kernels

        kernels.geglu(up, bias, made.values, made.scales)
    elif not up.is_meta:
        _fill(made, reference.geglu(up, bias))
    return made


def quantized_rows(x: torch.Tensor, room: Room | None = None) -> RowScaled:
    """Return `x` (rows, channels) in e4m3, in rows that `room` makes."""
    made = row_scaled(len(x), x.shape[1], x, True, room)
    if takes_kernels(x):
        from vivace.machinery.kernels import quantize_e4m3 as kernels

        assert made.scales is not None
        kernels.quantize_rows(x.contiguous(), made.values, made.scales)
    elif not x.is_meta:
        _fill(made, x)
    return made


def cross_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: torch.Tensor | None, room: Room | None = None
) -> torch.Tensor:
    """Return the attention of q to a text, rows (batch * tokens, heads * channels), rounded to e4m3 with `scale`."""
    batch, tokens, heads, channels = q.shape
    dtype = q.dtype if scale is None else torch.float8_e4m3fn
    rows = (room or q.new_empty)((batch * tokens, heads * channels), dtype=dtype)
    made = rows.view(batch, tokens, heads, channels)
    if made.is_meta:
        torch.ops.vivace.fused_attention(q, k, v, made)
    elif takes_kernels(q) and channels <= _MOST_CHANNELS:
        from vivace.machinery.kernels import cross_attention as kernels

        kernels.cross_attention(q, k, v, made, scale)
    else:
        heads_first = [tensor.float().transpose(1, 2) for tensor in (q, k, v)]
        mean = nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)
        made.copy_(mean if scale is None else reference.to_e4m3(mean / scale))
    return rows


def group_norm(
    x: torch.Tensor,
    norm: nn.GroupNorm,
    added: torch.Tensor | None,
    silu: bool,
    scale: torch.Tensor | None = None,
    room: Room | None = None,
) -> torch.Tensor:
    """Return GroupNorm(x + added), or SiLU of it, of (batch, channels, height, width) in channels_last; with `scale` in
    e4m3.

    `added` is (batch, channels); `room` makes the result's pixels, (batch * height * width, channels).
    """
    dtype = x.dtype if scale is None else torch.float8_e4m3fn
    if room is None:
        made = torch.empty_like(x, memory_format=torch.channels_last, dtype=dtype)
    else:
        batch, channels, height, width = x.shape
        rows = room((batch * height * width, channels), dtype=dtype)
        made = rows.view(batch, height, width, channels).permute(0, 3, 1, 2)
    arguments = (norm.num_groups, norm.weight, norm.bias, norm.eps, added, silu)
    if takes_kernels(x):
        from vivace.machinery.kernels import group_norm as kernels

        kernels.group_norm(pixels(x), pixels(made), *arguments, scale=scale)
    elif not x.is_meta:
        normed = reference.group_norm(pixels(x), *arguments)
        pixels(made).copy_(normed if scale is None else reference.to_e4m3(normed / scale))
    return made


def padded_norm(
    x: torch.Tensor, norm: nn.GroupNorm, added: torch.Tensor | None, scale: torch.Tensor | None
) -> PaddedImages:
    """Return SiLU(GroupNorm(x + added)) in the layout of vivace's convolutions, in bf16 or e4m3: see `group_norm`."""
    batch, channels, height, width = x.shape
    arguments = (norm.num_groups, norm.weight, norm.bias, norm.eps, added, True)
    if not (takes_kernels(x) or x.is_meta):
        normed = reference.group_norm(pixels(x), *arguments)
        rounded = normed.to(x.dtype) if scale is None else reference.to_e4m3(normed / scale)
        return reference.padded(rounded, height, width, scale)
    dtype = x.dtype if scale is None else torch.float8_e4m3fn
    rows = x.new_empty((batch * (height + 1) * (width + 1), channels), dtype=dtype)
    made = PaddedImages(rows, batch, height, width, scale)
    if not x.is_meta:
        from vivace.machinery.kernels import group_norm as kernels

        kernels.group_norm(pixels(x), made, *arguments)
    return made


def convolve(
    x: PaddedImages,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return conv(x) + bias + residual, (batch, channels, height, width) in bf16 and channels_last.

    Args:
        weight: (9, channels, input channels), of `x`'s dtype; with 16 instead of 9, `reference.enlarging`'s, the result
            is twice as high and wide.
        scales: (channels,), fp32, of weight and input together.
        bias: (channels,).
        residual: of the result's shape, in channels_last.
    """
    _, scale = reference.side_and_scale(len(weight))
    made = weight.new_empty((x.num_pixels * scale**2, weight.shape[1]), dtype=torch.bfloat16)
    rows = None if residual is None else pixels(residual).flatten(0, 1)
    if made.is_meta:
        torch.ops.vivace.fused_convolution(x.rows, weight, made)
    elif takes_kernels(made):
        from vivace.machinery.kernels import convolution

        convolution.convolve(x, weight, scales, made, bias, rows)
    else:
        made.copy_(reference.convolve(x, weight, scales, bias, rows))
    return made.view(x.batch, x.height * scale, x.width * scale, -1).permute(0, 3, 1, 2)


def add_biased(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return x + y + bias: all (batch, channels, height, width) in channels_last, but bias, (channels,)."""
    made = torch.empty_like(x, memory_format=torch.channels_last)
    if takes_kernels(x):
        from vivace.machinery.kernels import convolution

        flat = [pixels(tensor).flatten(0, 1) for tensor in (x, y, made)]
        convolution.add_biased(flat[0], flat[1], bias, flat[2])
    elif not x.is_meta:
        made.copy_(x.float() + y.float() + bias.float()[:, None, None])
    return made


def pixels(x: torch.Tensor) -> torch.Tensor:
    """(batch, channels, height, width) in channels_last as (batch, pixels, channels): a view."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _fill(made: RowScaled, wide: torch.Tensor) -> None:
    if made.scales is None:
        made.values.copy_(wide)
        return
    values, scales = reference.quantize_rows(wide)
    made.values.copy_(values)
    made.scales.copy_(scales[:, 0])
