"""Sparse attention by content in plain PyTorch: which blocks of keys a block of queries visits, and attention to them.

Queries and keys are averaged over blocks of tokens. A softmax over the products of those means estimates how much of
a block's attention goes to each block of keys, and the fewest blocks are visited whose estimates reach a share. The
block itself and the text are always visited, and the text visits everything. That keys' mean would be subtracted
before, as SageAttention does, changes no softmax over keys, so it is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Layout:
    """Tokens of a text, then those of an image, in blocks.

    Attributes:
        text: tokens, a multiple of both blocks.
        queries, keys: tokens of a block; `queries` is a multiple of `keys`.
    """

    text: int
    queries: int
    keys: int


def choose(q: torch.Tensor, k: torch.Tensor, layout: Layout, share: float) -> torch.Tensor:
    """Return which blocks are visited: (heads, blocks of queries, blocks of keys), bool.

    Args:
        q, k: (tokens, heads, channels). The last block may have fewer tokens.
        share: of the estimated attention, 0 to 1.
    """
    return visited(estimates(q, k, layout), layout, share)


def estimates(q: torch.Tensor, k: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return how much of a block's attention is estimated to go to each block of keys: (heads, blocks, blocks)."""
    means = [_means(x, rows) for x, rows in ((q, layout.queries), (k, layout.keys))]
    return (means[0] @ means[1].transpose(1, 2) * q.shape[2] ** -0.5).softmax(-1)


def exact(q: torch.Tensor, k: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return how much of a block's attention goes to each block of keys: what `estimates` estimates."""
    scores = torch.einsum("qhc,khc->hqk", q.float(), k.float()) * q.shape[2] ** -0.5
    of_keys = torch.stack([each.sum(-1) for each in scores.softmax(-1).split(layout.keys, dim=-1)], -1)
    return torch.stack([each.mean(1) for each in of_keys.split(layout.queries, dim=1)], 1)


def visited(portions: torch.Tensor, layout: Layout, share: float) -> torch.Tensor:
    """Return the fewest blocks whose portions reach a share, and those that are visited always."""
    ordered = portions.sort(dim=-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    least = ordered.masked_fill(before >= share, 2.0).amin(-1, keepdim=True)
    query, key = (torch.arange(length, device=portions.device) for length in portions.shape[1:])
    is_same = (key // (layout.queries // layout.keys))[None, :] == query[:, None]
    is_text = (key < layout.text // layout.keys)[None, :] | (query < layout.text // layout.queries)[:, None]
    return (portions >= least) | is_same | is_text


def random_blocks(
    heads: int, tokens: int, layout: Layout, density: float, generator: torch.Generator
) -> torch.Tensor:
    """Return as many random blocks for each block of queries as make up a density, its own among them."""
    query_blocks, key_blocks = tokens // layout.queries, tokens // layout.keys
    order = torch.rand(heads, query_blocks, key_blocks, generator=generator)
    ratio = layout.queries // layout.keys
    for query in range(query_blocks):
        order[:, query, query * ratio : (query + 1) * ratio] = 2.0
    number = max(ratio, round(density * key_blocks))
    chosen = order.topk(number, dim=-1).indices
    return torch.zeros_like(order, dtype=torch.bool).scatter_(-1, chosen, True)


def lists_of(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks to visit as counts and lists, int32, as the kernel reads them; lists are one longer than needed."""
    key_blocks = blocks.shape[-1]
    numbers = torch.arange(key_blocks, device=blocks.device).expand(blocks.shape)
    lists = numbers.masked_fill(~blocks, key_blocks).sort(-1).values.clamp_max(key_blocks - 1)
    return blocks.sum(-1).int(), torch.nn.functional.pad(lists, (0, 1)).int().contiguous()


def blocks_of(counts: torch.Tensor, lists: torch.Tensor) -> torch.Tensor:
    """Return counts and lists as blocks to visit."""
    key_blocks = lists.shape[-1] - 1
    is_listed = torch.arange(key_blocks, device=lists.device) < counts[..., None]
    blocks = torch.zeros(*counts.shape, key_blocks + 1, device=lists.device, dtype=torch.bool)
    kept = lists[..., :-1].long().masked_fill(~is_listed, key_blocks)
    return blocks.scatter_(-1, kept, True)[..., :-1]


def of_tokens(blocks: torch.Tensor, layout: Layout, tokens: int) -> torch.Tensor:
    """Return blocks to visit as a mask of tokens: (heads, tokens, tokens)."""
    rows = blocks.repeat_interleave(layout.queries, dim=1)[:, :tokens]
    return rows.repeat_interleave(layout.keys, dim=2)[:, :, :tokens]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor, layout: Layout
) -> torch.Tensor:
    """Return the attention to the visited blocks.

    Args:
        q, k, v: (tokens, heads, channels).
    """
    mask = of_tokens(blocks, layout, len(q))
    made = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask[None]
    )
    return made[0].transpose(0, 1)


def tile_order(height: int, width: int, tile: tuple[int, int]) -> torch.Tensor:
    """Return an image's tokens tile by tile: (height * width,), which token of raster order comes there.

    Tiles at the right and the bottom may be smaller.
    """
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    tiles_in_a_row = -(-width // tile[1])
    number = (y // tile[0]) * tiles_in_a_row + x // tile[1]
    within = (y % tile[0]) * tile[1] + x % tile[1]
    return (number * tile[0] * tile[1] + within).flatten().argsort()


def _means(x: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.stack([each.float().mean(0) for each in x.split(rows)], 1)


def structured(
    text: int, side: int, heads: int, channels: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """Return queries, keys and values of an image: (text + side * side, heads, channels) each, in raster order.

    Heads differ: in how large the things are that fields show, how sharply they attend, and how much is noise. Queries
    and keys are normed and turned by their places, as those of FLUX.1 are, so that near tokens attend to each other.
    """
    made = []
    fields = [_fields(side, heads, channels, generator) for _ in range(2)]
    sharpness = torch.linspace(1.0, 2.2, heads)[torch.randperm(heads, generator=generator)]
    turns = _turns(side, channels)
    for name, field in (("q", fields[0]), ("k", fields[0]), ("v", fields[1])):
        noise = torch.randn(field.shape, generator=generator)
        amount = torch.linspace(0.2, 1.0, heads)[:, None]
        words = torch.randn(text, heads, channels, generator=generator)
        x = torch.cat([words, field + amount * noise])
        if name != "v":
            x = x / x.square().mean(-1, keepdim=True).sqrt() * sharpness[:, None]
            pair = torch.view_as_complex(x[text:].unflatten(-1, (-1, 2)).contiguous())
            x = torch.cat([x[:text], torch.view_as_real(pair * turns[:, None]).flatten(-2)])
        made.append(x)
    return made


def _fields(side: int, heads: int, channels: int, generator: torch.Generator) -> torch.Tensor:
    """Return smooth values over an image for each head, of unit variance: (side * side, heads, channels)."""
    fields = []
    for head in range(heads):
        coarse = max(2, side // (4, 8, 16, 32)[head % 4])
        noise = torch.randn(1, channels, coarse, coarse, generator=generator)
        field = torch.nn.functional.interpolate(noise, size=(side, side), mode="bicubic", align_corners=False)
        fields.append((field / field.std())[0].flatten(1).T)
    return torch.stack(fields, 1)


def _turns(side: int, channels: int) -> torch.Tensor:
    """Return the turns of pairs of channels by row and by column: (side * side, channels / 2), complex."""
    of_axis = channels // 4
    angles = 10000.0 ** -(torch.arange(of_axis) / of_axis)
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    both = torch.cat([y.flatten()[:, None] * angles, x.flatten()[:, None] * angles], -1)
    return torch.polar(torch.ones_like(both), both)
