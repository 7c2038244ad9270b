"""Blocks with modulations of their own, over fused weights: those of all blocks are one table, computed before the
first step (see `vivace.machinery.fused.modulations`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from vivace.machinery.fused.block_weights import FusedArchitecture, FusedBlocks
from vivace.machinery.fused.modulations import OF_DOUBLE, OF_SINGLE, Modulations
from vivace.machinery.fused.operations import Places


class HoistedBlocks(nn.Module):
    """All weights that are taken over: see `FusedBlocks`.

    Args:
        num_inputs, num_guided: of the modulations' table: see `Modulations`.

    Attributes:
        takes_layers: diffusers' layers are not its own modules, but slots of its products.
        modulations: of double blocks, then of single ones or of second attentions.
        blocks: all others.
    """

    takes_layers = True

    def __init__(
        self,
        transformer: Any,
        architecture: FusedArchitecture,
        num_inputs: int,
        quantize: bool,
        bounded: tuple[bool, ...],
        places: Places,
        num_guided: int = 1,
    ) -> None:
        super().__init__()
        channels = transformer.inner_dim
        num_outputs = architecture.num_vectors(transformer) * channels
        num_doubles = len(architecture.blocks(transformer)[0])
        self.modulations = Modulations(num_outputs, channels, quantize, num_inputs, places, num_guided)
        num_taken = num_seconds = num_filled = 0

        def take(block: Any) -> None:
            nonlocal num_taken, num_seconds, num_filled
            assert architecture.modulations is not None
            layers = architecture.modulations(block)
            if architecture.order is None:
                for layer in layers:
                    num_filled = self.modulations.fill(num_filled, layer)
                return
            order = architecture.order(block)
            starts = [architecture.double_start(num_taken) + place for place in range(OF_DOUBLE)]
            if len(order) > OF_DOUBLE:
                first = architecture.single_start(num_seconds, num_doubles)
                starts += range(first, first + OF_SINGLE)
                num_seconds += 1
            num_taken += 1
            self._fill_in_order(layers, order, starts)

        self.blocks = FusedBlocks(transformer, architecture, quantize, bounded, places, take)

    def _fill_in_order(
        self, layers: Sequence[Any], order: Sequence[int | None], starts: Sequence[int]
    ) -> None:
        """Write a block's vectors to where they are in the table.

        Args:
            order: for each place, which of the layers' vectors it gets; None: zeros.
            starts: which of the table's vectors the places are.
        """
        size = layers[0].in_features
        pieces: list[list[tuple[slice, int]]] = [[] for _ in layers]
        for vector, start in zip(order, starts, strict=True):
            if vector is None:
                self.modulations.fill_zeros(start * size, size)
                continue
            for layer, own in zip(layers, pieces, strict=True):
                if vector * size < layer.out_features:
                    own.append((slice(vector * size, (vector + 1) * size), start * size))
                    break
                vector -= layer.out_features // size
        for layer, own in zip(layers, pieces, strict=True):
            self.modulations.fill_apart(layer, own)
