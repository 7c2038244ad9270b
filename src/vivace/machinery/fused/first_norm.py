"""The first block's norm alone: step caches decide by its output whether a step can be skipped."""

from __future__ import annotations

import torch
from torch import nn

from vivace.machinery.fused.modulations import Modulations


class FirstNorm(nn.Module):  # type: ignore[misc]
    """The first double block's `norm1`, over the fused weights.

    Args:
        modulations: stays registered with its owner only.
    """

    def __init__(self, modulations: Modulations) -> None:
        super().__init__()
        self._owner = [modulations]  # in a list, so that its weights are not counted and moved twice

    def forward(self, x: torch.Tensor, emb: torch.Tensor) -> tuple[torch.Tensor]:
        (owner,) = self._owner
        channels = x.shape[-1]
        rows = slice(0, 2 * channels)
        weight, bias = owner.weight[rows].to(emb.dtype), owner.bias[rows]
        if owner.scale is not None:
            weight = weight * owner.scale[rows, None].to(emb.dtype)
        shift, scale = nn.functional.linear(nn.functional.silu(emb), weight, bias).chunk(2, 1)
        normed = nn.functional.layer_norm(x, (channels,), eps=1e-6)
        return (normed * (1 + scale[:, None]) + shift[:, None],)


class FirstBlock(nn.Module):  # type: ignore[misc]
    """In the place of the first double block: its norm, and nothing else."""

    def __init__(self, modulations: Modulations) -> None:
        super().__init__()
        self.norm1 = FirstNorm(modulations)
