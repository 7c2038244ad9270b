"""The fused operations on any device: Triton's kernels on a GPU, plain PyTorch elsewhere, shapes alone on meta.

Functions return new tensors, except that `add_and_norm` also changes the residual stream in place.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from vivace.kernels.reference import Bounds, Branch, Modulation, Tokens


@dataclass(frozen=True)
class Rows:
    """Inputs of a matmul, (rows, channels): in bf16, or in e4m3 with a scale (rows, 1) for each row."""

    values: torch.Tensor
    scale: torch.Tensor | None = None


@dataclass(frozen=True)
class AttentionScales:
    """Scales of attention's e4m3 inputs and output, all in fp32; see `vivace.kernels.qk_norm_rope.qk_norm_rope`."""

    queries_keys: torch.Tensor
    bound: torch.Tensor
    values: torch.Tensor
    rows: torch.Tensor


def takes_kernels(x: torch.Tensor) -> bool:
    """Whether Triton's kernels compute with this tensor."""
    return bool(x.is_cuda) and has_triton()


@functools.cache
def has_triton() -> bool:
    from torch.utils._triton import has_triton

    return bool(has_triton())


def add_and_norm(
    x: torch.Tensor,
    branch: Branch | None,
    modulations: torch.Tensor,
    norm: tuple[Modulation, Modulation] | None,
    tokens: Tokens,
    quantize: bool,
    bounds: Bounds | None = None,
) -> Rows:
    """Add a gated branch to the stream, and return its norm, modulated: see `vivace.kernels.norm_modulate`."""
    import torch

    from vivace.kernels import reference

    if x.is_meta or takes_kernels(x):
        out = scale = None
        if norm is not None:
            out = torch.empty_like(x, dtype=torch.float8_e4m3fn if quantize else x.dtype)
            scale = x.new_empty((x.shape[0], 1), dtype=torch.float32) if quantize else None
        if not x.is_meta:
            from vivace.kernels.norm_modulate import residual_norm

            residual_norm(x, branch, modulations, norm, tokens, out, scale, bounds)
        return Rows(x if out is None else out, scale)
    if branch is not None:
        x.copy_(reference.add_gated(x, branch.values, branch.bias, modulations, branch.gate, tokens))
    if norm is None:
        return Rows(x)
    normed = reference.norm_modulate(x, modulations, *norm, tokens)
    if bounds is not None:
        of_rows = reference.product_bounds(normed, bounds.limits, tokens)
        if bounds.largest is not None:
            bounds.largest.copy_(torch.maximum(bounds.largest, of_rows.amax()))
        if bounds.row_scales is not None:
            bounds.row_scales.copy_(reference.scale_of(of_rows))
    return Rows(*reference.quantize_rows(normed)) if quantize else Rows(normed.to(x.dtype))


def attention_inputs(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    tokens: Tokens,
    num_heads: int,
    scales: AttentionScales | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values (batch, tokens, heads, channels), in e4m3 if `scales` are given.

    Values that need no bias, no rounding and no other order stay where they are: a view of `qkv`.
    """
    import torch

    from vivace.kernels import reference

    channels = weights.shape[-1]
    inner = num_heads * channels
    stays = scales is None and bias is None and (tokens.batch == 1 or not tokens.text)
    if not (qkv.is_meta or takes_kernels(qkv)):
        assert scales is None, "attention in fp8 is for GPUs"
        q, k, v = reference.qk_norm_rope(qkv, bias, weights, *rope, tokens, num_heads)
        return q.to(qkv.dtype), k.to(qkv.dtype), v.to(qkv.dtype)
    dtype = qkv.dtype if scales is None else torch.float8_e4m3fn
    shape = (tokens.batch, tokens.length, num_heads, channels)
    q, k = (torch.empty(shape, dtype=dtype, device=qkv.device) for _ in range(2))
    v = None if stays else torch.empty_like(q)
    if not qkv.is_meta:
        from vivace.kernels.qk_norm_rope import qk_norm_rope

        given = None if scales is None else (scales.queries_keys, scales.bound, scales.values, scales.rows)
        qk_norm_rope(qkv, bias, weights, *rope, tokens, q, k, v, given)
    if v is None:
        v = qkv[:, 2 * inner : 3 * inner].unflatten(-1, (num_heads, channels))
        v = v.unflatten(0, (tokens.batch, tokens.length))
    return q, k, v


def activate(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: Tokens,
    onto: Rows | None = None,
    bound: torch.Tensor | None = None,
) -> Rows:
    """Return GELU(x + bias): see `vivace.kernels.gelu`. It overwrites `x`, or is written to `onto` in e4m3."""
    from vivace.kernels import reference

    made = Rows(x) if onto is None else onto
    if x.is_meta:
        return made
    if takes_kernels(x):
        from vivace.kernels.gelu import gelu

        gelu(x, bias, tokens, made.values, made.scale, bound)
        return made
    active = reference.gelu(x, bias, tokens)
    if made.scale is not None:
        if bound is not None:
            made.scale.copy_(reference.scale_of(bound))
        active = reference.to_e4m3(active / made.scale)
    made.values.copy_(active)
    return made


def quantized(x: torch.Tensor, onto: Rows | None = None) -> Rows:
    """Return rows of bf16 in e4m3, with scales of their own, or with those of `onto`, to which they are written."""
    import torch

    from vivace.kernels import reference

    made = onto
    if made is None:
        made = Rows(
            torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device),
            torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device),
        )
    assert made.scale is not None
    if x.is_meta:
        return made
    if takes_kernels(x):
        from vivace.kernels.quantize_rows import quantize_rows

        quantize_rows(x, made.values, made.scale, is_given=onto is not None)
    elif onto is not None:
        made.values.copy_(reference.to_e4m3(x.float() / made.scale))
    else:
        return Rows(*reference.quantize_rows(x))
    return made
