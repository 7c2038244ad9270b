"""Residual, gate, LayerNorm, modulation and quantisation of a token, in one pass over it.

In PyTorch's operators these are seven passes: the gated branch is added to the stream, mean and variance are reduced,
the normalised token is scaled and shifted, its largest value is reduced, and it is divided and rounded. Each is bound
by memory. Here one program keeps one token (3,072 channels in FLUX) in registers: it reads the stream and the branch,
and writes the stream and the input of the next matmul.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vivace.kernels.reference import GROWTH, Modulation, Tokens


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _residual_norm(  # type: ignore[no-untyped-def]
    x,
    y,
    y2,
    bias,
    modulations,
    limits,
    out,
    out_scale,
    bound,
    num_text_rows,
    text,
    image,
    row_modulations,
    bias_stride,
    limits_stride,
    gate_text,
    gate_image,
    shift_text,
    shift_image,
    scale_text,
    scale_image,
    channels,
    eps,
    growth,
    BLOCK: tl.constexpr,  # noqa: N803
    NUM_YS: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    HAS_BOUND: tl.constexpr,  # noqa: N803
    QUANTIZE: tl.constexpr,  # noqa: N803
    NORM: tl.constexpr,  # noqa: N803
) -> None:
    row = tl.program_id(0)
    is_image = row >= num_text_rows
    stream = is_image.to(tl.int32)
    batch = tl.where(is_image, (row - num_text_rows) // image, row // text)
    own = modulations + batch.to(tl.int64) * row_modulations
    at = tl.arange(0, BLOCK)
    inside = at < channels
    start = row.to(tl.int64) * channels
    value = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
    if NUM_YS > 0:
        change = tl.load(y + start + at, mask=inside, other=0.0).to(tl.float32)
        if NUM_YS > 1:
            change += tl.load(y2 + start + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            change += tl.load(bias + stream * bias_stride + at, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(own + tl.where(is_image, gate_image, gate_text) + at, mask=inside, other=0.0)
        # Rounded here as it is stored, so that the norm sees what the next block will.
        stored = (value + gate.to(tl.float32) * change).to(x.dtype.element_ty)
        tl.store(x + start + at, stored, mask=inside)
        value = stored.to(tl.float32)
    if NORM:
        mean = tl.sum(value, axis=0) / channels
        centred = tl.where(inside, value - mean, 0.0)
        variance = tl.sum(centred * centred, axis=0) / channels
        scale = tl.load(own + tl.where(is_image, scale_image, scale_text) + at, mask=inside, other=0.0)
        shift = tl.load(own + tl.where(is_image, shift_image, shift_text) + at, mask=inside, other=0.0)
        normed = centred * (1.0 / tl.sqrt(variance + eps))
        normed = normed * (1.0 + scale.to(tl.float32)) + shift.to(tl.float32)
        if HAS_BOUND:
            length = tl.sqrt(tl.sum(normed * normed, axis=0))
            largest_weight = tl.load(limits + stream * limits_stride)
            largest_bias = tl.load(limits + stream * limits_stride + 1)
            tl.atomic_max(bound, length * largest_weight * growth + largest_bias, sem="relaxed")
        if QUANTIZE:
            largest = tl.maximum(tl.max(tl.abs(normed), axis=0), 1e-12)
            normed = tl.minimum(tl.maximum(normed * (448.0 / largest), -448.0), 448.0)
            tl.store(out_scale + row, largest / 448.0)
        tl.store(out + start + at, normed.to(out.dtype.element_ty), mask=inside)


def residual_norm(
    x: torch.Tensor,
    ys: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    gate: Modulation | None,
    modulations: torch.Tensor,
    norm: tuple[Modulation, Modulation] | None,
    tokens: Tokens,
    out: torch.Tensor | None,
    scale: torch.Tensor | None,
    limits: torch.Tensor | None = None,
    bound: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Add gate * (sum of ys + bias) to `x` in place, and write its norm, modulated, to `out`.

    Args:
        x: (rows, channels), the residual stream.
        ys: none, one or two tensors like x.
        bias: (1 or 2, channels): of all rows, or of the text's and the image's.
        modulations: (batch, all modulations); `gate` and `norm` (shift, scale) say where theirs start.
        out: (rows, channels); e4m3 if `scale` is given, else x's dtype. None with `norm`: nothing is normalised.
        scale: (rows, 1), fp32: one for each row of an e4m3 `out`.
        limits, bound: see `vivace.kernels.reference.value_bound`; `bound`, (1,) in fp32, becomes at least it.
    """
    rows, channels = x.shape
    shift_at, scale_at = norm if norm is not None else (Modulation(0, 0), Modulation(0, 0))
    gate = gate if gate is not None else Modulation(0, 0)
    _residual_norm[(rows,)](
        x,
        ys[0] if ys else x,
        ys[1] if len(ys) > 1 else x,
        bias if bias is not None else x,
        modulations,
        limits if limits is not None else x,
        out if out is not None else x,
        scale if scale is not None else x,
        bound if bound is not None else x,
        tokens.num_text_rows,
        tokens.text,
        tokens.image,
        modulations.stride(0),
        channels if bias is not None and bias.shape[0] > 1 else 0,
        2 if limits is not None and limits.shape[0] > 1 else 0,
        gate.text,
        gate.image,
        shift_at.text,
        shift_at.image,
        scale_at.text,
        scale_at.image,
        channels,
        eps,
        GROWTH,
        BLOCK=triton.next_power_of_2(channels),
        NUM_YS=len(ys),
        HAS_BIAS=bias is not None,
        HAS_BOUND=bound is not None,
        QUANTIZE=scale is not None,
        NORM=norm is not None,
        num_warps=4,
    )
