"""Latents at another size, by their frequencies, and the positions of their tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def resized(latents: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Return latents (..., rows, columns) at another size: the same low frequencies of an orthonormal cosine transform.

    White noise keeps its variance. Larger, there are no other frequencies; smaller, they are gone. To keep an image's
    values, multiply by the square root of the ratio of the areas, new to old.
    """
    rows, columns = (
        _resizing(old, new).to(latents) for old, new in zip(latents.shape[-2:], size, strict=True)
    )
    return rows @ latents @ columns.T


def _resizing(old: int, new: int) -> torch.Tensor:
    """Return the matrix (new, old) from values to low frequencies to values."""
    common = min(old, new)
    return cosines(new)[:common].T @ cosines(old)[:common]


def cosines(size: int) -> torch.Tensor:
    """Return the matrix of the orthonormal discrete cosine transform (DCT-II): a row for each frequency."""
    import torch

    frequencies, places = torch.arange(size, dtype=torch.float64)[:, None], torch.arange(size) + 0.5
    matrix = torch.cos(math.pi / size * frequencies * places) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix


def stretched(ids: torch.Tensor, full: tuple[int, int], low: tuple[int, int]) -> torch.Tensor:
    """Return the positions (tokens, 3) of a low resolution's tokens: their centres, counted in tokens of full size."""
    ids = ids.float()
    for axis, (many, few) in enumerate(zip(full, low, strict=True), 1):
        ids[..., axis] = (ids[..., axis] + 0.5) * many / few - 0.5
    return ids
