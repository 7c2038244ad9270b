"""Attention in fp8 that visits some blocks of keys for each block of queries, and the choice of blocks, in Triton.

Forward only, e4m3 with one scale for a tensor, as cuDNN's in `vivace.machinery.attention_backends.cudnn_fp8`. Hopper's
matmuls in e4m3 read both operands along what is summed, so values come transposed: tokens are next to each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.sparse_attention_reference import Layout

ROUNDED_BITS = 8.0
"""The softmax's numerators are scaled by 2 to this before they are rounded to e4m3, as cuDNN's are."""


@dataclass(frozen=True)
class Division:
    """How one program divides its work.

    Attributes:
        queries, keys: of a matmul; at most those of the layout's blocks.
        overlaps: whether one turn's second product runs during the next one's softmax, for more registers.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    overlaps: bool = False


DIVISIONS = (
    Division(128, 128, 8, 2),
    Division(128, 64, 8, 3),
    Division(64, 128, 4, 2),
    Division(64, 64, 4, 3),
    Division(128, 128, 8, 2, overlaps=True),
    Division(128, 128, 8, 3, overlaps=True),
    Division(128, 64, 8, 3, overlaps=True),
    Division(64, 128, 4, 2, overlaps=True),
    Division(64, 128, 4, 3, overlaps=True),
    Division(64, 64, 4, 3, overlaps=True),
    Division(64, 64, 4, 4, overlaps=True),
)
"""Those with fewer registers than they take, so that one more program fits, have their matmuls serialised by ptxas."""


@triton.jit
def _attend(
    q,
    k,
    v,
    out,
    scales,
    counts,
    lists,
    factor,
    list_stride,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CHANNELS: tl.constexpr,
    QUERY_PARTS: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    BITS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    # A head's programs follow each other, so that its keys and values stay in the level-2 cache.
    block, head = tl.program_id(0), tl.program_id(1)
    row = head * (tl.num_programs(0) // QUERY_PARTS) + block // QUERY_PARTS
    number = tl.load(counts + row) * KEY_PARTS
    # If there might be none, the way around the loop would define sums, too, and ptxas would make each wgmma
    # wait for the one before (its note C7515).
    tl.assume(number > 0)
    lists += row * list_stride
    scale = tl.load(scales) * tl.load(scales + 1) * factor
    queries = q.load([block * QUERIES, head * CHANNELS])
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, CHANNELS], tl.float32)
    shrunk = tl.full([QUERIES], 0.0, tl.float32)
    codes = tl.zeros([QUERIES, KEYS], tl.int8)
    # The next block's number is read one turn early: its keys would otherwise wait for it.
    following = tl.load(lists)
    last = following * KEY_PARTS * KEYS
    for turn in range(number):
        first = (following * KEY_PARTS + turn % KEY_PARTS) * KEYS
        following = tl.load(lists + (turn + 1) // KEY_PARTS)
        keys = k.load([first, head * CHANNELS])
        scores = tl.dot(queries, keys.T)
        if OVERLAP:
            # The turn before's second product runs while this turn's softmax is computed.
            values = v.load([head * CHANNELS, last])
            sums = tl.dot(codes.to(v.dtype, bitcast=True), values.T, sums * shrunk[:, None])
        before = largest
        largest = tl.maximum(before, tl.max(scores, axis=1) * scale)
        numerators = tl.exp2(scores * scale - (largest - BITS)[:, None])
        shrunk = tl.exp2(before - largest)
        total = total * shrunk + tl.sum(numerators, axis=1)
        rounded = numerators.to(v.dtype)
        codes = rounded.to(tl.int8, bitcast=True)
        last = first
        if not OVERLAP:
            values = v.load([head * CHANNELS, first])
            sums = tl.dot(rounded, values.T, sums * shrunk[:, None])
    if OVERLAP:
        values = v.load([head * CHANNELS, last])
        sums = tl.dot(codes.to(v.dtype, bitcast=True), values.T, sums * shrunk[:, None])
    made = sums * (1.0 / total)[:, None]
    out.store([block * QUERIES, head * CHANNELS], made.to(out.dtype))


@triton.jit
def _pool(x, means, stride, ROWS: tl.constexpr, CHANNELS: tl.constexpr) -> None:
    block, head = tl.program_id(0), tl.program_id(1)
    row, channel = tl.arange(0, ROWS), tl.arange(0, CHANNELS)
    at = (block * ROWS + row)[:, None] * stride + head * CHANNELS + channel[None, :]
    mean = tl.sum(tl.load(x + at).to(tl.float32), axis=0) * (1.0 / ROWS)
    tl.store(means + (head * tl.num_programs(0) + block) * CHANNELS + channel, mean)


@triton.jit
def _choose(
    products,
    scales,
    counts,
    lists,
    share,
    factor,
    key_blocks,
    text_blocks,
    text_key_blocks,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    block, head = tl.program_id(0), tl.program_id(1)
    row = head * tl.num_programs(0) + block
    at = tl.arange(0, WIDTH)
    exists = at < key_blocks
    scale = tl.load(scales) * tl.load(scales + 1) * factor
    scores = tl.load(products + row * key_blocks + at, mask=exists, other=float("-inf")) * scale
    portions = tl.exp2(scores - tl.max(scores, axis=0))
    portions /= tl.sum(portions, axis=0)
    ordered = tl.sort(portions, descending=True)
    before = tl.cumsum(ordered, axis=0) - ordered
    least = tl.min(tl.where(before < share, ordered, 2.0), axis=0)
    always = (at // RATIO == block) | (at < text_key_blocks) | (block < text_blocks)
    visited = exists & ((portions >= least) | always)
    place = tl.cumsum(visited.to(tl.int32), axis=0) - 1
    tl.store(lists + row * (key_blocks + 1) + place, at, mask=visited)
    tl.store(counts + row, tl.sum(visited.to(tl.int32), axis=0))


@triton.jit
def _arrange(
    x, order, out, stride, tokens, ROWS: tl.constexpr, CHANNELS: tl.constexpr, TRANSPOSE: tl.constexpr
) -> None:
    block, head = tl.program_id(0), tl.program_id(1)
    row, channel = block * ROWS + tl.arange(0, ROWS), head * CHANNELS + tl.arange(0, CHANNELS)
    source = tl.load(order + row)
    rows = tl.load(x + source[:, None] * stride + channel[None, :])
    if TRANSPOSE:
        tl.store(out + channel[:, None] * tokens + row[None, :], tl.trans(rows))
    else:
        tl.store(out + row[:, None] * stride + channel[None, :], rows)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qk_scales: torch.Tensor,
    counts: torch.Tensor,
    lists: torch.Tensor,
    out: torch.Tensor,
    layout: Layout,
    division: Division,
) -> None:
    """Write softmax(q k^T / sqrt(channels)) v to `out`, with the values' scale, over the keys of the listed blocks.

    Args:
        q, k: (tokens, heads, channels), e4m3; tokens are a multiple of the layout's blocks.
        v: (heads, channels, tokens), e4m3.
        qk_scales: (2,), fp32, of queries and keys.
        counts: (heads, blocks of queries), int32: how many blocks of keys are visited, at least one.
        lists: (heads, blocks of queries, blocks of keys + 1), int32: which; what is behind them does not matter.
        out: of q's shape: e4m3, or wider.
    """
    tokens, heads, channels = q.shape
    assert all(x.is_contiguous() for x in (q, k, v, out))
    assert tokens % layout.queries == tokens % layout.keys == 0
    width = heads * channels
    of_queries, of_keys, of_values = (
        [division.queries, channels],
        [division.keys, channels],
        [channels, division.keys],
    )
    _attend[(tokens // division.queries, heads)](
        TensorDescriptor(q, [tokens, width], [width, 1], of_queries),
        TensorDescriptor(k, [tokens, width], [width, 1], of_keys),
        TensorDescriptor(v, [width, tokens], [tokens, 1], of_values),
        TensorDescriptor(out, [tokens, width], [width, 1], of_queries),
        qk_scales,
        counts,
        lists,
        math.log2(math.e) / math.sqrt(channels),
        lists.stride(1),
        QUERIES=division.queries,
        KEYS=division.keys,
        CHANNELS=channels,
        QUERY_PARTS=layout.queries // division.queries,
        KEY_PARTS=layout.keys // division.keys,
        BITS=ROUNDED_BITS,
        OVERLAP=division.overlaps,
        num_warps=division.warps,
        num_stages=division.stages,
    )


def choose(
    q: torch.Tensor, k: torch.Tensor, qk_scales: torch.Tensor, layout: Layout, share: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the counts and lists of the blocks to visit, as `sparse_attention_reference.choose` chooses them.

    Four launches: the means of the blocks of queries and of keys, their products, and the choice.
    """
    _, heads, channels = q.shape
    means = [_means(x, rows) for x, rows in ((q, layout.queries), (k, layout.keys))]
    products = torch.bmm(means[0], means[1].transpose(1, 2))
    query_blocks, key_blocks = products.shape[1:]
    counts = torch.empty(heads, query_blocks, device=q.device, dtype=torch.int32)
    # Kernels read one number behind a list.
    lists = torch.empty(heads, query_blocks, key_blocks + 1, device=q.device, dtype=torch.int32)
    _choose[(query_blocks, heads)](
        products,
        qk_scales,
        counts,
        lists,
        share,
        math.log2(math.e) / math.sqrt(channels),
        key_blocks,
        layout.text // layout.queries,
        layout.text // layout.keys,
        RATIO=layout.queries // layout.keys,
        WIDTH=triton.next_power_of_2(key_blocks),
        num_warps=2,
    )
    return counts, lists


def _means(x: torch.Tensor, rows: int) -> torch.Tensor:
    tokens, heads, channels = x.shape
    means = torch.empty(heads, tokens // rows, channels, device=x.device, dtype=torch.float32)
    _pool[(tokens // rows, heads)](x, means, x.stride(0), ROWS=rows, CHANNELS=channels, num_warps=4)
    return means


def arrange(
    x: torch.Tensor, order: torch.Tensor, out: torch.Tensor, transpose: bool = False, rows: int = 64
) -> None:
    """Write tokens in another order.

    Args:
        x: (tokens, heads, channels), e4m3.
        order: (tokens,), int32: which token comes there.
        out: like x; with `transpose` (heads, channels, tokens).
        rows: tokens of a program; they divide all of them.
    """
    tokens, heads, channels = x.shape
    assert tokens % rows == 0
    _arrange[(tokens // rows, heads)](
        x, order, out, x.stride(0), tokens, ROWS=rows, CHANNELS=channels, TRANSPOSE=transpose, num_warps=4
    )
