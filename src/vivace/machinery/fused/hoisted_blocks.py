"""Blocks with modulations of their own, over fused weights: those of all blocks are one table, computed before the
first step (see `vivace.machinery.fused.modulations`)."""

from __future__ import annotations

from typing import Any

from torch import nn

from vivace.machinery.fused.block_weights import Architecture, FusedBlocks
from vivace.machinery.fused.modulations import OF_DOUBLE, OF_SINGLE, Modulations
from vivace.machinery.fused.operations import Places


class HoistedBlocks(nn.Module):  # type: ignore[misc]
    """All weights that are taken over: see `FusedBlocks`.

    Args:
        num_inputs: of the modulations' table: see `Modulations`.

    Attributes:
        takes_layers: diffusers' layers are not its own modules, but slots of its products.
        modulations: of double blocks, then of single ones.
        blocks: all others.
    """

    takes_layers = True

    def __init__(
        self,
        transformer: Any,
        architecture: Architecture,
        num_inputs: int,
        quantize: bool,
        bounded: tuple[bool, ...],
        places: Places,
    ) -> None:
        super().__init__()
        channels = transformer.inner_dim
        num_doubles, num_singles = (len(blocks) for blocks in architecture.blocks(transformer))
        num_outputs = (OF_DOUBLE * num_doubles + OF_SINGLE * num_singles) * channels
        self.modulations = Modulations(num_outputs, channels, quantize, num_inputs, places)
        num_filled = 0

        def take(block: Any) -> None:
            nonlocal num_filled
            assert architecture.modulations is not None
            for layer in architecture.modulations(block):
                num_filled = self.modulations.fill(num_filled, layer)

        self.blocks = FusedBlocks(transformer, architecture, quantize, bounded, places, take)
