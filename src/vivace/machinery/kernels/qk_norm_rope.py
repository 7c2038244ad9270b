"""RMSNorm and rotary embedding of queries and keys, from the fused projection into attention's own buffers.

PyTorch's operators would split the projection, normalise queries and keys, join the text's tokens and the image's,
rotate pairs of channels, and, for fp8, divide and round: about twelve passes. Here one program takes one token and a
few heads: it reads each element of the projection once, and writes each element of attention's inputs once.

For fp8, no pass is needed to find scales. A normalised query of n channels has the norm sqrt(n) before its weight, so
no element exceeds sqrt(n) max|w|, rotated or not. For values see `vivace.machinery.fused.scales`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vivace.machinery.kernels.reference import TokenLayout

_HEADS, _WARPS = 8, 2
"""Heads and warps per program: 8 heads of 128 channels are 16 elements a thread."""


@triton.jit
def _normed_and_rotated(
    x, weight, cos, sin, odd_cos, odd_sin, eps, HEADS: tl.constexpr, CHANNELS: tl.constexpr
):
    mean = tl.sum(x * x, axis=1) / CHANNELS
    x = x * (1.0 / tl.sqrt(mean + eps))[:, None] * weight[None, :]
    even, odd = tl.split(tl.reshape(x, (HEADS, CHANNELS // 2, 2)))
    rotated = tl.join(
        even * cos[None, :] - odd * sin[None, :], odd * odd_cos[None, :] + even * odd_sin[None, :]
    )
    return tl.reshape(rotated, (HEADS, CHANNELS))


@triton.jit
def _projected(source, bias, at, inside, HAS_BIAS: tl.constexpr):
    x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _scaled(x, scale):
    return x * (1.0 / scale)  # the cast saturates


# Numbers of tokens are not compiled in, so that another size of an image is not another kernel.
@triton.jit(do_not_specialize=["num_text_rows", "text", "image"])
def _qk_norm_rope(
    qkv,
    bias,
    weights,
    cos,
    sin,
    q,
    k,
    v,
    qk_scales,
    v_scale,
    row_stride,
    q_stride,
    kv_stride,
    kv_token_stride,
    rope_stride,
    num_text_rows,
    text,
    image,
    num_heads,
    num_key_heads,
    bias_stride,
    weights_stride,
    eps,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_QUERIES: tl.constexpr,
    HAS_KEYS: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    is_image = row >= num_text_rows
    stream = is_image.to(tl.int32)
    within = tl.where(is_image, row - num_text_rows, row)
    length = tl.where(is_image, image, text)
    position = within % length + tl.where(is_image, text, 0)

    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, CHANNELS)
    at = heads[:, None] * CHANNELS + channel[None, :]
    inside = (heads < num_heads)[:, None] & (channel < CHANNELS)[None, :]
    has_key = (heads < num_key_heads)[:, None] & (channel < CHANNELS)[None, :]
    inner = num_heads * CHANNELS
    values_at = inner + num_key_heads * CHANNELS
    source = qkv + row.to(tl.int64) * row_stride
    of_bias = bias + stream * bias_stride
    weights += stream * weights_stride
    picture = (within // length).to(tl.int64)
    of_query = picture * q_stride + position * inner + at
    of_key = picture * kv_stride + position * kv_token_stride + at
    half = tl.arange(0, CHANNELS // 2)
    of_token = CHANNELS if BY_CHANNEL else CHANNELS // 2
    angle = picture * rope_stride + position * of_token + half
    c = tl.load(cos + angle)
    s = tl.load(sin + angle)
    odd_c, odd_s = c, s
    if BY_CHANNEL:
        odd_c = tl.load(cos + angle + CHANNELS // 2)
        odd_s = tl.load(sin + angle + CHANNELS // 2)

    if HAS_QUERIES:
        raw_q = _projected(source, of_bias, at, inside, HAS_BIAS)
    if HAS_KEYS:
        raw_k = _projected(source, of_bias, inner + at, has_key, HAS_BIAS)
    if HAS_QUERIES:
        weight_q = tl.load(weights + channel).to(tl.float32)
        new_q = _normed_and_rotated(raw_q, weight_q, c, s, odd_c, odd_s, eps, HEADS, CHANNELS)
        if QUANTIZE:
            new_q = _scaled(new_q, tl.load(qk_scales))
        tl.store(q + of_query, new_q.to(q.dtype.element_ty), mask=inside)
    if HAS_KEYS:
        weight_k = tl.load(weights + CHANNELS + channel).to(tl.float32)
        new_k = _normed_and_rotated(raw_k, weight_k, c, s, odd_c, odd_s, eps, HEADS, CHANNELS)
        if QUANTIZE:
            new_k = _scaled(new_k, tl.load(qk_scales + 1))
        tl.store(k + of_key, new_k.to(k.dtype.element_ty), mask=has_key)
    if HAS_VALUES:
        values = _projected(source, of_bias, values_at + at, has_key, HAS_BIAS)
        if QUANTIZE:
            values = _scaled(values, tl.load(v_scale))
        tl.store(v + of_key, values.to(v.dtype.element_ty), mask=has_key)


def qk_norm_rope(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    tokens: TokenLayout,
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 1e-6,
    heads: tuple[int, int] | None = None,
) -> None:
    """Write attention's inputs, those that are not None.

    Args:
        qkv: (rows, at least all heads * channels): queries, keys and values side by side; rows may be wider.
        bias: (1 or 2, at least as wide), of all rows, or of the text's and the image's.
        weights: (1 or 2, 2, channels), the norms of queries and keys; channels is a power of two.
        cos, sin: (tokens, channels / 2), of all images, or (batch, tokens, channels / 2); fp32, contiguous. Of twice
            that width they are of the even channels, and then of the odd ones.
        q, k, v: (batch, tokens, heads, channels). q is contiguous. k and v have the same strides, and a token's heads
            lie side by side.
        scales: of e4m3 buffers, fp32: those of queries and keys (2,), and that of values (1 or more,), the first.
        heads: of queries, and of keys and values; None: they are as many.
    """
    made = [each for each in (q, k, v) if each is not None]
    keys = [each for each in (k, v) if each is not None]
    channels = made[0].shape[3]
    num_heads, num_key_heads = heads or (made[0].shape[2],) * 2
    qk_scales, v_scale = scales if scales is not None else (cos, cos)
    assert weights.is_contiguous()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert q is None or q.is_contiguous()
    assert all(each[0, 0].is_contiguous() and each.stride() == keys[0].stride() for each in keys)
    assert (num_heads + 2 * num_key_heads) * channels <= qkv.stride(0)
    _qk_norm_rope[(qkv.shape[0], triton.cdiv(num_heads, _HEADS))](
        qkv,
        bias if bias is not None else qkv,
        weights,
        cos,
        sin,
        q if q is not None else made[0],
        k if k is not None else made[0],
        v if v is not None else made[0],
        qk_scales,
        v_scale,
        qkv.stride(0),
        made[0].stride(0),
        made[-1].stride(0),
        made[-1].stride(1),
        cos.stride(0) if cos.ndim == 3 else 0,
        tokens.num_text_rows,
        tokens.text,
        tokens.image,
        num_heads,
        num_key_heads,
        bias.stride(0) if bias is not None and bias.shape[0] > 1 else 0,
        2 * channels if weights.shape[0] > 1 else 0,
        eps,
        HEADS=min(_HEADS, triton.next_power_of_2(num_heads)),
        CHANNELS=channels,
        HAS_BIAS=bias is not None,
        HAS_QUERIES=q is not None,
        HAS_KEYS=k is not None,
        HAS_VALUES=v is not None,
        QUANTIZE=scales is not None,
        BY_CHANNEL=cos.shape[-1] == channels,
        num_warps=_WARPS,
    )
