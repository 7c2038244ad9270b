"""Attention of the fused blocks: PyTorch's in bf16, cuDNN's in e4m3."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from vivace.machinery.fused import operations
from vivace.machinery.fused.operations import AttentionScales, Rows
from vivace.machinery.kernels.reference import TokenLayout, from_joint

Launch = Callable[[int, Callable[[], Any]], Any]
"""Launches cuDNN's kernel on a stream."""


def attend(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scales: AttentionScales | None,
    tokens: TokenLayout,
    values: torch.Tensor | None,
    onto: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    launch: Launch | None = None,
) -> Rows:
    """Return attention's output as rows of tokens, (rows, channels), in e4m3 if there is a scale for it.

    Args:
        qkv: each (batch, tokens, heads, channels): in e4m3 with `scales`, else in bf16. A head of keys and values may
            be for several of queries that lie side by side.
        values: (1 or more,), fp32, the first of which is the scale of an output that is computed in bf16.
        onto: where to write it, (rows, channels), which may be part of wider rows.
        mask: (batch, tokens), which keys there are; in bf16 alone.
    """
    q, k, v = qkv
    if scales is None:
        grouped = k.shape[2] != q.shape[2]
        if grouped and mask is not None:  # PyTorch's kernels that take a mask know no groups
            k, v = (each.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for each in (k, v))
            grouped = False
        out = torch.nn.functional.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in (q, k, v)),
            attn_mask=None if mask is None else mask[:, None, None],
            enable_gqa=grouped,
        )
        attended = _as_rows(out.transpose(1, 2), tokens)
        if values is not None:
            return operations.quantized(attended, values[:1], onto)
        return Rows(attended if onto is None else onto.copy_(attended))
    assert mask is None, "cuDNN's attention in e4m3 takes no mask here"
    in_order = onto is not None and (tokens.batch == 1 or not tokens.text)
    eight = torch.empty_like(q)
    if onto is not None and in_order:
        eight = onto.unflatten(-1, q.shape[2:]).unflatten(0, q.shape[:2])
    if not q.is_meta:
        from vivace.machinery.attention_backends.cudnn_fp8 import attend as by_cudnn

        compute = functools.partial(by_cudnn, q, k, v, scales.queries_keys, scales.values, eight)
        if launch is None:
            compute()
        else:
            launch(torch.cuda.current_stream().cuda_stream, compute)
    if onto is None or not in_order:
        attended = _as_rows(eight.view(torch.uint8), tokens).view(torch.float8_e4m3fn)
        onto = attended if onto is None else onto.copy_(attended)
    return Rows(onto, scales.values[:1])


def _as_rows(joint: torch.Tensor, tokens: TokenLayout) -> torch.Tensor:
    """(batch, tokens, heads, channels) as rows (rows, heads * channels)."""
    return from_joint(joint.flatten(2), tokens)
