"""The first block's norm alone: step caches decide by its output whether a step can be skipped."""

from __future__ import annotations

from typing import Any


def first_norm(modulations: Any) -> Any:
    """Return a module in the place of the first double block: its `norm1`, over the fused weights, and nothing else.

    Args:
        modulations: see `vivace.fused.modulations`; it stays registered with its owner only.
    """
    import torch

    class FirstNorm(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._owner = [modulations]  # in a list, so that its weights are not counted and moved twice

        def forward(self, x: torch.Tensor, emb: torch.Tensor) -> tuple[torch.Tensor]:
            (owner,) = self._owner
            channels = x.shape[-1]
            rows = slice(0, 2 * channels)
            weight, bias = owner.weight[rows].to(emb.dtype), owner.bias[rows]
            if owner.scale is not None:
                weight = weight * owner.scale[rows, None].to(emb.dtype)
            shift, scale = torch.nn.functional.linear(torch.nn.functional.silu(emb), weight, bias).chunk(2, 1)
            normed = torch.nn.functional.layer_norm(x, (channels,), eps=1e-6)
            return (normed * (1 + scale[:, None]) + shift[:, None],)

    class FirstBlock(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm1 = FirstNorm()

    return FirstBlock()
