"""The fused operations on any device: Triton's kernels on a GPU, plain PyTorch elsewhere, shapes alone on meta.

Functions return new tensors, except that `add_and_norm` also changes the residual stream in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vivace.machinery.kernels import reference
from vivace.machinery.kernels.reference import Branch, Modulation, TokenLayout, from_joint


class Room(Protocol):
    """Makes rows of a shape, undefined; they may be part of wider ones: see `vivace.machinery.fused.lora_columns`."""

    def __call__(self, shape: Sequence[int], *, dtype: torch.dtype) -> torch.Tensor: ...


@dataclass(frozen=True)
class Places:
    """Where a model computes, and where its weights are left: in host memory, if they are offloaded or copied later."""

    work: torch.device
    home: torch.device


@dataclass(frozen=True)
class Rows:
    """Inputs of a matmul, (rows, channels): in bf16, or in e4m3 with a scale (1 or 2,), of all or of each stream."""

    values: torch.Tensor
    scale: torch.Tensor | None = None


@dataclass(frozen=True)
class RowScaled:
    """Rows of a matmul's input, (rows, channels): in bf16, or in e4m3 with a scale for each row, (rows,), in fp32."""

    values: torch.Tensor
    scales: torch.Tensor | None = None


@dataclass(frozen=True)
class AttentionScales:
    """Scales in fp32: of queries and keys, (2,), and of values and output, the scale and its inverse."""

    queries_keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class AttentionPreparation:
    """The steps from a projection's rows to attention's inputs: bias, norms, rotary embedding and rounding.

    Attributes:
        bias: (1 or 2, outputs), of all rows, or of the text's and the image's; None: is added already.
        weights: (1 or 2, 2, channels), of the norms of queries and keys.
        rope: cosines and sines, each (tokens, channels / 2), of all images, or (batch, tokens, channels / 2). Of twice
            that width they are of the even channels, and then of the odd ones.
        scales: None: no rounding to e4m3.
        eps: of the norms.
        num_key_heads: of keys and values; None: as many as queries have.
    """

    bias: torch.Tensor | None
    weights: torch.Tensor
    rope: tuple[torch.Tensor, torch.Tensor]
    tokens: TokenLayout
    num_heads: int
    scales: AttentionScales | None
    eps: float = 1e-6
    num_key_heads: int | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of queries: (batch, tokens, heads, channels)."""
        return self.tokens.batch, self.tokens.length, self.num_heads, self.weights.shape[-1]

    @property
    def shape_of_keys(self) -> tuple[int, int, int, int]:
        batch, length, heads, channels = self.shape
        return batch, length, self.num_key_heads or heads, channels

    def dtype(self, qkv: torch.Tensor) -> torch.dtype:
        return qkv.dtype if self.scales is None else torch.float8_e4m3fn


def takes_kernels(x: torch.Tensor) -> bool:
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
    tokens: TokenLayout,
    scale: torch.Tensor | None,
    eps: float = 1e-6,
    room: Room | None = None,
    centred: bool = True,
) -> Rows:
    """Add a gated branch to the stream, and return its norm, modulated: see `kernels.norm_modulate`."""
    out = None
    if norm is not None:
        out = (room or x.new_empty)(x.shape, dtype=x.dtype if scale is None else torch.float8_e4m3fn)
    if x.is_meta or takes_kernels(x):
        if not x.is_meta:
            from vivace.machinery.kernels.norm_modulate import residual_norm

            residual_norm(x, branch, modulations, norm, tokens, out, scale, eps, centred)
        return Rows(x if out is None else out, scale)
    if branch is not None:
        x.copy_(reference.add_gated(x, branch.change(), branch.bias, modulations, branch.gate, tokens))
    if norm is None or out is None:
        return Rows(x)
    normed = reference.norm_modulate(x, modulations, *norm, tokens, eps, centred)
    if scale is not None:
        normed = reference.to_e4m3(normed / reference.by_stream(scale[:, None], tokens))
    return Rows(out.copy_(normed), scale)


def add_and_rms_norm(
    x: torch.Tensor,
    branch: Branch | None,
    vectors: torch.Tensor,
    weight: int | None,
    scale: torch.Tensor | None,
    eps: float,
    room: Room | None = None,
) -> Rows:
    """Add the norm of a branch to the stream, and return the sum's norm: see `kernels.rms_residual`."""
    values, row_scales, gate = (None, None, 0)
    if branch is not None:
        values, row_scales, gate = branch.values, branch.row_scales, branch.gate.image
    rows, channels = x.shape
    out = None
    if weight is not None:
        out = (room or x.new_empty)(x.shape, dtype=x.dtype if scale is None else torch.float8_e4m3fn)
    if takes_kernels(x):
        from vivace.machinery.kernels.rms_residual import rms_residual

        rms_residual(x, values, row_scales, vectors, gate, weight or 0, out, scale, eps)
    elif not x.is_meta:
        if values is not None:
            change = values.float() if row_scales is None else values.float() * row_scales[:, None]
            change = reference.rms_normal(change, eps)
            x.copy_(x.float() + change * reference.for_each_row(vectors, gate, channels, rows))
        if out is not None:
            assert weight is not None
            normed = reference.rms_normal(x, eps) * reference.for_each_row(vectors, weight, channels, rows)
            out.copy_(normed if scale is None else reference.to_e4m3(normed / scale))
    return Rows(x if out is None else out, scale)


def attention_inputs(
    qkv: torch.Tensor, preparation: AttentionPreparation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values (batch, tokens, heads, channels), in e4m3 if there are scales."""
    tokens = preparation.tokens
    needs_nothing = preparation.scales is None and preparation.bias is None
    q = torch.empty(preparation.shape, dtype=preparation.dtype(qkv), device=qkv.device)
    k = q.new_empty(preparation.shape_of_keys)
    v = None if needs_nothing and (tokens.batch == 1 or not tokens.text) else torch.empty_like(k)
    write_attention_inputs(qkv, preparation, (q, k, v))
    if v is None:
        start, inner = q.shape[2:].numel() + k.shape[2:].numel(), k.shape[2:].numel()
        v = qkv[:, start : start + inner].unflatten(-1, k.shape[2:]).unflatten(0, k.shape[:2])
    return q, k, v


def write_attention_inputs(
    qkv: torch.Tensor,
    preparation: AttentionPreparation,
    onto: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
) -> None:
    """Write queries, keys and values, those whose tensor is not None. Nothing else of `qkv` is read."""
    scales, heads = preparation.scales, (preparation.num_heads, preparation.shape_of_keys[2])
    arguments = (qkv, preparation.bias, preparation.weights, *preparation.rope, preparation.tokens)
    if takes_kernels(qkv):
        from vivace.machinery.kernels.qk_norm_rope import qk_norm_rope

        of_rounding = None if scales is None else (scales.queries_keys, scales.values)
        qk_norm_rope(*arguments, *onto, of_rounding, preparation.eps, heads)
    elif not qkv.is_meta:
        made = reference.qk_norm_rope(*arguments, heads[0], preparation.eps, heads[1])
        factors = (None,) * 3 if scales is None else (*scales.queries_keys, scales.values[0])
        for out, new, factor in zip(onto, made, factors, strict=True):
            if out is not None:
                out.copy_(new if factor is None else reference.to_e4m3(new / factor))


def attend(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scales: AttentionScales | None,
    tokens: TokenLayout,
    values: torch.Tensor | None,
    onto: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    launch: Callable[[int, Callable[[], Any]], Any] | None = None,
    num_keys: torch.Tensor | None = None,
) -> Rows:
    """Return attention's output as rows of tokens, (rows, channels), in e4m3 if there is a scale for it.

    In bf16 attention is PyTorch's, in e4m3 cuDNN's.

    Args:
        qkv: each (batch, tokens, heads, channels): in e4m3 with `scales`, else in bf16. A head of keys and values may
            be for several of queries that lie side by side.
        values: (1 or more,), fp32, the first of which is the scale of an output that is computed in bf16.
        onto: where to write it, (rows, channels), which may be part of wider rows.
        mask: (batch, tokens), which keys there are, or (batch, 1, tokens, tokens), PyTorch's; in bf16 alone.
        launch: launches cuDNN's kernel on a stream.
        num_keys: (batch,), int32, how many keys there are, the first; None: all.
    """

    def as_rows(joint: torch.Tensor) -> torch.Tensor:
        return from_joint(joint.flatten(2), tokens)

    q, k, v = qkv
    if scales is None:
        if num_keys is not None:
            mask = torch.arange(k.shape[1], device=k.device) < num_keys[:, None]
        grouped = k.shape[2] != q.shape[2]
        if grouped and mask is not None:  # PyTorch's kernels that take a mask know no groups
            k, v = (each.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for each in (k, v))
            grouped = False
        out = torch.nn.functional.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in (q, k, v)),
            attn_mask=mask[:, None, None] if mask is not None and mask.ndim == 2 else mask,
            enable_gqa=grouped,
        )
        attended = as_rows(out.transpose(1, 2))
        if values is not None:
            return quantized(attended, values[:1], onto)
        return Rows(attended if onto is None else onto.copy_(attended))
    assert mask is None, "cuDNN's attention in e4m3 takes no mask here"
    in_order = onto is not None and (tokens.batch == 1 or not tokens.text)
    eight = torch.empty_like(q)
    if onto is not None and in_order:
        eight = onto.unflatten(-1, q.shape[2:]).unflatten(0, q.shape[:2])
    if not q.is_meta:
        from vivace.machinery.attention_backends.cudnn_fp8 import attend as by_cudnn

        compute = functools.partial(by_cudnn, q, k, v, scales.queries_keys, scales.values, eight, num_keys)
        if launch is None:
            compute()
        else:
            launch(torch.cuda.current_stream().cuda_stream, compute)
    if onto is None or not in_order:
        attended = as_rows(eight.view(torch.uint8)).view(torch.float8_e4m3fn)
        onto = attended if onto is None else onto.copy_(attended)
    return Rows(onto, scales.values[:1])


def quantized(x: torch.Tensor, scale: torch.Tensor, onto: torch.Tensor | None = None) -> Rows:
    """Return rows of bf16 in e4m3 with one scale, (1,), written to `onto` if it is given."""
    made = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device) if onto is None else onto
    if takes_kernels(x):
        from vivace.machinery.kernels.quantize_e4m3 import quantize

        quantize(x, made, scale)
    elif not x.is_meta:
        made.copy_(reference.to_e4m3(x.float() / scale))
    return Rows(made, scale)


def sigmoid_gated(attended: Rows, gate: torch.Tensor, scale: torch.Tensor | None, room: Room) -> Rows:
    """Return sigmoid(gate) times attention's output, in e4m3 if there is a scale, (1,), which e4m3 inputs have too."""
    x = attended.values
    made = room(x.shape, dtype=x.dtype if scale is None else torch.float8_e4m3fn)
    divisor = None if attended.scale is not None else scale
    if takes_kernels(x):
        from vivace.machinery.kernels.gates import sigmoid_gate

        sigmoid_gate(x, gate, made, divisor)
    elif not x.is_meta:
        gated = x.float() * gate.float().sigmoid()
        gated = gated if divisor is None else gated / divisor
        made.copy_(gated if scale is None else reference.to_e4m3(gated))
    return Rows(made, scale)


def row_scaled(
    rows: int, channels: int, like: torch.Tensor, quantize: bool, room: Room | None = None
) -> RowScaled:
    """Return rows on a tensor's device, undefined: in e4m3 with scales, or in the tensor's dtype."""
    dtype = torch.float8_e4m3fn if quantize else like.dtype
    values = (room or like.new_empty)((rows, channels), dtype=dtype)
    return RowScaled(values, like.new_empty(rows, dtype=torch.float32) if quantize else None)


def swiglu(
    up: torch.Tensor, quantize: bool, attended: Rows | None = None, room: Room | None = None
) -> RowScaled:
    """Return attention's output, if there is one, and SiLU(g) h beside it: see `vivace.machinery.kernels.gates`."""
    beside = 0 if attended is None else attended.values.shape[1]
    made = row_scaled(len(up), beside + up.shape[1] // 2, up, quantize, room)
    if takes_kernels(up):
        from vivace.machinery.kernels import gates as kernels

        of_attention = () if attended is None else (attended.values, attended.scale)
        kernels.swiglu(up, made.values, made.scales, *of_attention)
    elif not up.is_meta:
        _fill_swiglu(made, reference.swiglu(up), attended)
    return made


def _fill_swiglu(made: RowScaled, hidden: torch.Tensor, attended: Rows | None) -> None:
    unit = None if attended is None else attended.scale
    if attended is not None:
        mean = attended.values.float() if unit is None else attended.values.float() * unit
        hidden = torch.cat([mean, hidden], dim=1)
    if made.scales is None:
        made.values.copy_(hidden)
        return
    scales = reference.scale_of(hidden.abs().amax(dim=1))
    if unit is not None:
        scales = unit * reference.power_of_two_above(scales / unit)
    made.scales.copy_(scales)
    made.values.copy_(reference.to_e4m3(hidden / scales[:, None]))
