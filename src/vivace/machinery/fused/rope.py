"""FLUX's rotary embedding as tables of cosines and sines, one column for each pair of channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def frequencies(axes: Sequence[int], theta: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the frequency of each pair of channels, in fp64, and the axis whose position it turns by."""
    import torch

    angles, of_axis = [], []
    for axis, channels in enumerate(axes):
        exponents = torch.arange(0, channels, 2, dtype=torch.float64) / channels
        angles.append(theta**-exponents)
        of_axis.append(torch.full((channels // 2,), axis))
    return torch.cat(angles).to(device), torch.cat(of_axis).to(device)


def tables(
    ids: torch.Tensor, frequency: torch.Tensor, axis: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines (tokens, pairs) in fp32 for positions (tokens, axes); fp64 before, as in diffusers."""
    angles = ids.double().index_select(1, axis) * frequency
    return angles.cos().float(), angles.sin().float()


def of_image(ids: torch.Tensor) -> torch.Tensor:
    """Return positions (tokens, axes) of one image, of those of a batch, which are the same."""
    return ids[0] if ids.ndim == 3 else ids
