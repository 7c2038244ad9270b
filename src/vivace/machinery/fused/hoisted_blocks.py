"""Blocks with modulations of their own, over fused weights: those of all blocks are one table, computed before the
first step (see `vivace.machinery.fused.modulations`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vivace.machinery.fused.block_forward import FusedForward
from vivace.machinery.fused.block_weights import FusedArchitecture, FusedBlocks
from vivace.machinery.fused.forms import FusedTransformer, Fusing
from vivace.machinery.fused.modulations import OF_DOUBLE, OF_SINGLE, Hoisting, Modulations


class HoistedBlocks(nn.Module):
    """All weights that are taken over: see `FusedBlocks`, and `Modulations` for their table."""

    takes_layers = True

    def __init__(
        self,
        transformer: Any,
        architecture: FusedArchitecture,
        num_inputs: int,
        how: Fusing,
        num_guided: int = 1,
    ) -> None:
        super().__init__()
        channels = transformer.inner_dim
        num_outputs = architecture.num_vectors(transformer) * channels
        num_doubles = len(architecture.blocks(transformer)[0])
        self.modulations = Modulations(
            num_outputs, channels, how.quantize, num_inputs, how.places, num_guided
        )
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

        self.blocks = FusedBlocks(transformer, architecture, how, take)

    def _fill_in_order(
        self, layers: Sequence[Any], order: Sequence[int | None], starts: Sequence[int]
    ) -> None:
        """Write a block's vectors to their places in the table: `order` says which are at its `starts`, None: zeros."""
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

    def hoist(self, transformer: Any, pipe: Any, forward: Any, **how: Any) -> FusedTransformer:
        """Replace a transformer's forward, and let a pipeline's call fill the table."""
        transformer.forward = forward
        hoisting = Hoisting(pipe, self.modulations, forward.inputs_of, **how)
        transformer.register_forward_pre_hook(hoisting, with_kwargs=True)
        counts = {
            "denoiser.modulations_hoisted": lambda: hoisting.num_hoisted,
            "denoiser.modulations_computed_in_the_loop": lambda: int(self.modulations.num_computed),
        }
        return FusedTransformer(self, lambda: forward.num_calls, counts)


class HoistedForward(FusedForward):
    """A forward whose blocks' modulations are a table: `inputs_of` says what it is searched for."""

    def __init__(self, transformer: Any, fused: HoistedBlocks) -> None:
        super().__init__(transformer, fused.blocks)
        self._modulations = fused.modulations


class FirstModulation(nn.Module):
    """The first block's first vectors of modulations, over the fused weights, (batch, vectors * channels)."""

    def __init__(self, modulations: Modulations, num_vectors: int, layer: int = 0) -> None:
        super().__init__()
        self._owner = [modulations]  # in a list, so that its weights are not counted and moved twice
        self._num_vectors, self._layer = num_vectors, layer

    def forward(self, emb: torch.Tensor) -> torch.Tensor:
        (owner,) = self._owner
        start = self._layer * OF_DOUBLE // 2 * owner.weight.shape[1]
        rows = slice(start, start + self._num_vectors * owner.weight.shape[1])
        weight, bias = owner.weight[rows].to(emb.dtype), owner.bias[rows]
        if owner.scale is not None:
            weight = weight * owner.scale[rows, None].to(emb.dtype)
        active = nn.functional.silu(emb)
        made = nn.functional.linear(active, weight, bias.to(emb.dtype))
        change = owner.loras.of_layer(self._layer, active)
        return made if change is None else made + change[:, : made.shape[1]]


class FirstNorm(nn.Module):
    """The first double block's `norm1`, over the fused weights."""

    def __init__(self, modulations: Modulations) -> None:
        super().__init__()
        self.modulation = FirstModulation(modulations, 2)

    def forward(self, x: torch.Tensor, emb: torch.Tensor) -> tuple[torch.Tensor]:
        shift, scale = self.modulation(emb).chunk(2, 1)
        normed = nn.functional.layer_norm(x, x.shape[-1:], eps=1e-6)
        return (normed * (1 + scale[:, None]) + shift[:, None],)


class FirstBlock(nn.Module):
    """Replaces the first double block: its norm, by whose output step caches decide, and nothing else."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm1 = norm
