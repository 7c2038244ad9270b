"""What chains of single-stream blocks share: how diffusers' blocks become fused weights, one block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from vivace.machinery.fused.operations import Places
from vivace.machinery.fused.scales import spread


def take_over(
    chain: nn.Module,
    blocks: Iterable[tuple[nn.Module, bool]],
    parts: Sequence[str],
    weights_of: Callable[[nn.Module, bool], tuple[nn.Module, torch.Tensor | None]],
    places: Places,
) -> None:
    """Give a chain its `blocks`, and in fp8 `largest` and `unit`, and take the layers from diffusers' blocks.

    Args:
        blocks: diffusers' blocks, and of each whether attention's inputs are to be bounded, for fp8.
        parts: the attributes of a block whose layers the fused weights replace.
        weights_of: returns the fused weights of a block, and the largest norm of a row of the values' e4m3 weight, ();
            None in bf16.
    """
    chain.blocks = nn.ModuleList()
    largest = []
    for block, is_bounded in blocks:
        block.to(places.work)
        weights, largest_row = weights_of(block, is_bounded)
        if largest_row is not None:
            largest.append(largest_row)
        chain.blocks.append(weights.to(places.home))
        for part in parts:
            delattr(block, part)
    chain.register_buffer("largest", torch.stack(largest).to(places.home) if largest else None)
    unit = spread(torch.ones(1, device=places.home))[0] if largest else None
    chain.register_buffer("unit", unit, persistent=False)
