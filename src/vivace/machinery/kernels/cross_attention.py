"""Attention to a text: many queries, and so few keys that a program holds all of a head's at once.

A program takes some queries of one head. With one prompt's 77 words it needs neither a loop nor a running maximum: what
is left is about the time of reading the queries and writing the output. PyTorch's kernels are made for as many keys as
queries, and write bf16, which a kernel of its own would round to e4m3. Here the output is rounded where it is made: it
is a mean of values, so their largest is its bound, and one scale from that does for all rows.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

_MORE = 16
"""Words of a block's second part. Triton's blocks are powers of two, and prompts are multiples of 77 words: blocks of
64 and 16 do for 77, and one of 128 would take half as long again."""
_PROGRAMS = 132
"""Multiprocessors of a Hopper GPU: programs take many queries, and so read a text less often, if that many are left."""


@triton.jit
def _rows(
    x,
    first,
    stride,
    limit,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUMBER: tl.constexpr,
    UNIT: tl.constexpr,
):
    row, channel = tl.arange(0, NUMBER), tl.arange(0, BLOCK)
    inside = (first + row < limit)[:, None] & (channel < CHANNELS)[None, :]
    at = (row * stride * UNIT)[:, None] + channel[None, :]
    return tl.load(x + tl.cast(first, tl.int64) * stride * UNIT + at, mask=inside, other=0.0)


@triton.jit
def _products(q, k, first, words, NUMBER: tl.constexpr):
    exists = first + tl.arange(0, NUMBER) < words
    return tl.where(exists[None, :], tl.dot(q, tl.trans(k)), float("-inf"))


@triton.jit
def _block(
    q,
    k,
    v,
    first,
    words,
    k_stride,
    v_stride,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    MORE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Return a block's products of queries and keys, and its values: each in two parts."""
    keys = _rows(k, first, k_stride, words, CHANNELS, BLOCK, WORDS, UNIT)
    more_keys = _rows(k, first + WORDS, k_stride, words, CHANNELS, BLOCK, MORE, UNIT)
    values = _rows(v, first, v_stride, words, CHANNELS, BLOCK, WORDS, UNIT)
    more_values = _rows(v, first + WORDS, v_stride, words, CHANNELS, BLOCK, MORE, UNIT)
    products = _products(q, keys, first, words, WORDS)
    return products, _products(q, more_keys, first + WORDS, words, MORE), values, more_values


# Sizes are not compiled in, so that another image or text is not another kernel.
@triton.jit(do_not_specialize=["tokens", "words"])
def _cross_attention(
    q,
    k,
    v,
    out,
    scale,
    tokens,
    words,
    factor,
    q_strides,
    k_strides,
    v_strides,
    out_stride,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    MORE: tl.constexpr,
    UNIT: tl.constexpr,
    IS_LONG: tl.constexpr,
    QUANTIZE: tl.constexpr,
) -> None:
    # Heads are next to each other in time as in memory: they share the cache lines where one ends and the next begins.
    head, first, image = tl.program_id(0), tl.program_id(1) * ROWS, tl.program_id(2).to(tl.int64)
    q += (image * q_strides[0] + head * q_strides[2]) * UNIT
    k += (image * k_strides[0] + head * k_strides[2]) * UNIT
    v += (image * v_strides[0] + head * v_strides[2]) * UNIT
    queries = _rows(q, first, q_strides[1], tokens, CHANNELS, BLOCK, ROWS, UNIT)

    scores, more, values, more_values = _block(
        queries, k, v, 0, words, k_strides[1], v_strides[1], CHANNELS, BLOCK, WORDS, MORE, UNIT
    )
    largest = tl.maximum(tl.max(scores, axis=1), tl.max(more, axis=1))
    scores = tl.exp2(scores * factor - (largest * factor)[:, None])
    more = tl.exp2(more * factor - (largest * factor)[:, None])
    total = tl.sum(scores, axis=1) + tl.sum(more, axis=1)
    sums = tl.dot(scores.to(v.dtype.element_ty), values)
    sums = tl.dot(more.to(v.dtype.element_ty), more_values, sums)
    if IS_LONG:
        for start in range(WORDS + MORE, words, WORDS + MORE):
            scores, more, values, more_values = _block(
                queries, k, v, start, words, k_strides[1], v_strides[1], CHANNELS, BLOCK, WORDS, MORE, UNIT
            )
            before = largest
            largest = tl.maximum(before, tl.maximum(tl.max(scores, axis=1), tl.max(more, axis=1)))
            shrunk = tl.exp2((before - largest) * factor)
            scores = tl.exp2(scores * factor - (largest * factor)[:, None])
            more = tl.exp2(more * factor - (largest * factor)[:, None])
            total = total * shrunk + tl.sum(scores, axis=1) + tl.sum(more, axis=1)
            sums = tl.dot(scores.to(v.dtype.element_ty), values, sums * shrunk[:, None])
            sums = tl.dot(more.to(v.dtype.element_ty), more_values, sums)

    if QUANTIZE:
        total *= tl.load(scale)
    made = sums * (1.0 / total)[:, None]  # the cast saturates
    row, channel = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (first + row < tokens)[:, None] & (channel < CHANNELS)[None, :]
    to = out + (image * tokens + first) * out_stride + head * CHANNELS
    tl.store(to + (row * out_stride)[:, None] + channel[None, :], made.to(out.dtype.element_ty), mask=inside)


def cross_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: torch.Tensor | None = None
) -> None:
    """Write the attention of queries to words.

    Args:
        q: (batch, tokens, heads, channels); k, v: (batch, words, heads, channels): all bf16, any views whose channels
            are next to each other. Heads have at most 256 channels: a program holds them all.
        out: of q's shape, whose tokens may be part of wider rows: bf16, or e4m3 divided by the scale.
        scale: (1 or more,), fp32: its first; None: nothing is rounded to e4m3.
    """
    batch, tokens, heads, channels = q.shape
    words = k.shape[1]
    assert q.stride(3) == k.stride(3) == v.stride(3) == 1
    assert out[0, 0].is_contiguous()
    assert batch == 1 or out.stride(0) == tokens * out.stride(1)
    strides = [tensor.stride()[:3] for tensor in (q, k, v)]
    # So that Triton knows that a load can take several channels: of 16 bytes if heads have 40.
    unit = math.gcd(8, *(stride for three in strides for stride in three))
    block = max(16, triton.next_power_of_2(channels))
    is_enough = block <= 128 and batch * heads * triton.cdiv(tokens, 128) >= _PROGRAMS
    rows = 128 if is_enough else 64
    # With 64 words registers do not suffice for a loop over blocks of 256 channels.
    block_words = 32 if block > 128 and words > 64 + _MORE else 64
    is_long = words > block_words + _MORE
    _cross_attention[(heads, triton.cdiv(tokens, rows), batch)](
        q,
        k,
        v,
        out,
        scale if scale is not None else q,
        tokens,
        words,
        math.log2(math.e) / math.sqrt(channels),
        *(tuple(stride // unit for stride in three) for three in strides),
        out.stride(1),
        ROWS=rows,
        CHANNELS=channels,
        BLOCK=block,
        WORDS=block_words,
        MORE=_MORE,
        UNIT=unit,
        IS_LONG=is_long,
        QUANTIZE=scale is not None,
        num_warps=rows // 16,
        num_stages=1 if block == 128 else 2,
    )
