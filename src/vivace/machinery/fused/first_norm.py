"""The first block's norm alone: step caches decide by its output whether a step can be skipped."""

from __future__ import annotations

import torch
from torch import nn

from vivace.machinery.fused.modulations import Modulations


class FirstModulation(nn.Module):
    """The first block's first vectors of modulations, over the fused weights, (batch, vectors * channels).

    Args:
        modulations: stays registered with its owner only.
    """

    def __init__(self, modulations: Modulations, num_vectors: int) -> None:
        super().__init__()
        self._owner = [modulations]  # in a list, so that its weights are not counted and moved twice
        self._num_vectors = num_vectors

    def forward(self, emb: torch.Tensor) -> torch.Tensor:
        (owner,) = self._owner
        rows = slice(0, self._num_vectors * owner.weight.shape[1])
        weight, bias = owner.weight[rows].to(emb.dtype), owner.bias[rows]
        if owner.scale is not None:
            weight = weight * owner.scale[rows, None].to(emb.dtype)
        active = nn.functional.silu(emb)
        made = nn.functional.linear(active, weight, bias.to(emb.dtype))
        change = owner.loras.of_layer(0, active)
        return made if change is None else made + change[:, rows]


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
    """Replaces the first double block: its norm, and nothing else."""

    def __init__(self, modulations: Modulations) -> None:
        super().__init__()
        self.norm1 = FirstNorm(modulations)
