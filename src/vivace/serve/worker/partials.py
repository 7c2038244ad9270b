"""Partial images: a linear projection of the latents to colours, fitted to the model's own decoder once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vivace.runtime.finite_images import FiniteCheck

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Projection:
    """Latents to colours.

    Attributes:
        pipe: the pipeline, which knows how its latents are packed.
        weights: (channels + 1, 3); the last row is the offset.
        spread: standard deviation of finished latents. Those of early steps are larger, by their noise.
    """

    pipe: Any
    weights: NDArray[np.float32]
    spread: float

    def image(self, latents: Any, height: int, width: int) -> Image:
        """Return an image of the size of the first latents, one pixel for each of their places.

        Raises:
            NotFinite: the latents are NaN or infinity.
        """
        from PIL import Image

        grid = _grid(self.pipe, latents, height, width)
        assert grid is not None
        FiniteCheck().look(grid)
        grid = grid * min(1.0, self.spread / max(float(grid.std()), 1e-6))
        colours = _with_offset(grid) @ self.weights
        return Image.fromarray(np.clip(colours, 0, 255).astype(np.uint8))


def fit_projection(pipe: Any, latents: Any, image: Image) -> Projection | None:
    """Fit the projection to the last latents of a call and its image by least squares; None for an unknown layout."""
    grid = _grid(pipe, latents, image.height, image.width)
    if grid is None:
        return None
    rows, columns = grid.shape[:2]
    pixels = np.asarray(image.convert("RGB").resize((columns, rows)), dtype=np.float64)
    inputs = _with_offset(grid).reshape(rows * columns, -1).astype(np.float64)
    ridge = 1e-3 * np.trace(inputs.T @ inputs) / inputs.shape[1] * np.eye(inputs.shape[1])
    weights = np.linalg.solve(inputs.T @ inputs + ridge, inputs.T @ pixels.reshape(-1, 3))
    return Projection(pipe, weights.astype(np.float32), float(grid.std()))


def _grid(pipe: Any, latents: Any, height: int, width: int) -> NDArray[np.float32] | None:
    """Return the first latents as (rows, columns, channels); None where their layout is not known."""
    if latents.dim() == 3 and hasattr(pipe, "_unpack_latents") and height and width:
        latents = pipe._unpack_latents(latents, height, width, pipe.vae_scale_factor)
    if latents.dim() != 4:
        return None
    grid: NDArray[np.float32] = latents[0].permute(1, 2, 0).float().cpu().numpy()
    return grid


def _with_offset(grid: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.concatenate([grid, np.ones((*grid.shape[:2], 1), np.float32)], axis=2)
