"""The gate of attention's output, sigmoid(g) x, and its rounding to e4m3, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MOST = 2048
"""Channels of a program."""


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
    block = min(_MOST, triton.next_power_of_2(channels))
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
