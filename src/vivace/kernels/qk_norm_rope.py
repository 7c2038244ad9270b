"""RMSNorm and rotary embedding of queries and keys, from the fused projection into attention's own buffers.

PyTorch's operators would split the projection, normalise queries and keys, join the text's tokens and the image's,
rotate pairs of channels, and, for fp8, divide and round: about twelve passes. Here one program takes one token and a
few heads: it reads each element of the projection once, and writes each element of attention's inputs once.

For fp8, no pass is needed to find scales. A normalised query of n channels has the norm sqrt(n) before its weight, so
no element exceeds sqrt(n) max|w|, rotated or not. For values see `vivace.fused.scales`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vivace.kernels.reference import Tokens

_HEADS, _WARPS = 8, 2
"""Heads and warps per program: 8 heads of 128 channels are 16 elements a thread."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _normed_and_rotated(x, weight, cos, sin, eps, HEADS: tl.constexpr, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    mean = tl.sum(x * x, axis=1) / CHANNELS
    x = x * (1.0 / tl.sqrt(mean + eps))[:, None] * weight[None, :]
    even, odd = tl.split(tl.reshape(x, (HEADS, CHANNELS // 2, 2)))
    rotated = tl.join(even * cos[None, :] - odd * sin[None, :], odd * cos[None, :] + even * sin[None, :])
    return tl.reshape(rotated, (HEADS, CHANNELS))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _scaled(x, scale):  # type: ignore[no-untyped-def]
    return x * (1.0 / scale)  # the cast saturates


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _qk_norm_rope(  # type: ignore[no-untyped-def]
    qkv,
    bias,
    weights,
    cos,
    sin,
    q,
    k,
    v,
    elsewhere,
    qk_scales,
    v_scale,
    row_stride,
    num_text_rows,
    text,
    image,
    num_heads,
    bias_stride,
    weights_stride,
    eps,
    HEADS: tl.constexpr,  # noqa: N803
    CHANNELS: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    HAS_VALUES: tl.constexpr,  # noqa: N803
    QUANTIZE: tl.constexpr,  # noqa: N803
    NUM_ELSEWHERE: tl.constexpr,  # noqa: N803
) -> None:
    row = tl.program_id(0)
    is_image = row >= num_text_rows
    stream = is_image.to(tl.int32)
    within = tl.where(is_image, row - num_text_rows, row)
    length = tl.where(is_image, image, text)
    position = within % length + tl.where(is_image, text, 0)
    token = (within // length).to(tl.int64) * (text + image) + position

    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, CHANNELS)
    at = heads[:, None] * CHANNELS + channel[None, :]
    inside = (heads < num_heads)[:, None] & (channel < CHANNELS)[None, :]
    inner = num_heads * CHANNELS
    source = qkv + row.to(tl.int64) * row_stride
    target = token * inner + at
    half = tl.arange(0, CHANNELS // 2)
    c = tl.load(cos + position * (CHANNELS // 2) + half)
    s = tl.load(sin + position * (CHANNELS // 2) + half)

    raw_q = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    raw_k = tl.load(source + inner + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        raw_q += tl.load(bias + stream * bias_stride + at, mask=inside, other=0.0).to(tl.float32)
        raw_k += tl.load(bias + stream * bias_stride + inner + at, mask=inside, other=0.0).to(tl.float32)
    weight_q = tl.load(weights + stream * weights_stride + channel).to(tl.float32)
    weight_k = tl.load(weights + stream * weights_stride + CHANNELS + channel).to(tl.float32)
    new_q = _normed_and_rotated(raw_q, weight_q, c, s, eps, HEADS, CHANNELS)
    new_k = _normed_and_rotated(raw_k, weight_k, c, s, eps, HEADS, CHANNELS)
    if QUANTIZE:
        new_q = _scaled(new_q, tl.load(qk_scales))
        new_k = _scaled(new_k, tl.load(qk_scales + 1))
    tl.store(q + target, new_q.to(q.dtype.element_ty), mask=inside)
    tl.store(k + target, new_k.to(k.dtype.element_ty), mask=inside)
    for other in tl.static_range(NUM_ELSEWHERE):
        tl.store(elsewhere[2 * other] + target, new_k.to(k.dtype.element_ty), mask=inside)
    if HAS_VALUES:
        values = tl.load(source + 2 * inner + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            values += tl.load(bias + stream * bias_stride + 2 * inner + at, mask=inside, other=0.0).to(
                tl.float32
            )
        if QUANTIZE:
            values = _scaled(values, tl.load(v_scale))
        tl.store(v + target, values.to(v.dtype.element_ty), mask=inside)
        for other in tl.static_range(NUM_ELSEWHERE):
            tl.store(elsewhere[2 * other + 1] + target, values.to(v.dtype.element_ty), mask=inside)


def qk_norm_rope(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    tokens: Tokens,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 1e-6,
    elsewhere: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
) -> None:
    """Write attention's inputs.

    Args:
        qkv: (rows, at least 3 * heads * channels): queries, keys and values side by side; rows may be wider.
        bias: (1 or 2, at least as wide), of all rows, or of the text's and the image's.
        weights: (1 or 2, 2, channels), the norms of queries and keys; channels is a power of two.
        cos, sin: (tokens, channels / 2), fp32.
        q, k, v: (batch, tokens, heads, channels), contiguous. v may be None: then values are left where they are.
        scales: of e4m3 buffers, fp32: those of queries and keys (2,), and that of values (1 or more,), the first.
        elsewhere: other places of keys and values, such as other GPUs' memory, each written likewise. Needs v.
    """
    _, _, num_heads, channels = q.shape
    inner = num_heads * channels
    qk_scales, v_scale = scales if scales is not None else (cos, cos)
    assert weights.is_contiguous()
    assert v is not None or not elsewhere
    _qk_norm_rope[(qkv.shape[0], triton.cdiv(num_heads, _HEADS))](
        qkv,
        bias if bias is not None else qkv,
        weights,
        cos,
        sin,
        q,
        k,
        v if v is not None else q,
        tuple(tensor for pair in elsewhere for tensor in pair) or (q,),
        qk_scales,
        v_scale,
        qkv.stride(0),
        tokens.num_text_rows,
        tokens.text,
        tokens.image,
        num_heads,
        bias.stride(0) if bias is not None and bias.shape[0] > 1 else 0,
        2 * channels if weights.shape[0] > 1 else 0,
        eps,
        HEADS=min(_HEADS, triton.next_power_of_2(num_heads)),
        CHANNELS=channels,
        HAS_BIAS=bias is not None,
        HAS_VALUES=v is not None,
        QUANTIZE=scales is not None,
        NUM_ELSEWHERE=len(elsewhere),
        num_warps=_WARPS,
    )
    assert inner <= qkv.stride(0)
