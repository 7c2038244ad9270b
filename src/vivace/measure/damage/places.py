"""Damage that depends on the place: content that is moved, stale, pasted or gone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vivace.measure.damage.details import blurred, reduced

Pixels = NDArray[np.float64]
_TOKEN = 16  # pixels a side
_STALE_BLUR = 4.0  # pixels
_GHOST = 8  # pixels
_COARSE = 4.0


def shifted(image: Pixels, by: float, _: object = None) -> Pixels:
    """Move the image right by a number of pixels, which may be fractional; edges are repeated."""
    number, part = int(by), by - int(by)
    moved = _moved(image, number)
    return moved if part == 0 else (1 - part) * moved + part * _moved(image, number + 1)


def _moved(image: Pixels, by: int) -> Pixels:
    width = image.shape[1]
    return np.pad(image, ((0, 0), (by, 0), (0, 0)), mode="edge")[:, :width]


def ghosted(image: Pixels, percent: float, _: object = None) -> Pixels:
    """Blend with the image moved by 8 pixels."""
    share = percent / 100
    return np.asarray((1 - share) * image + share * _moved(image, _GHOST))


def stale(image: Pixels, percent: float, random: np.random.Generator) -> Pixels:
    """Replace tiles of 16 x 16 pixels by those of a much blurrier image."""
    height, width = image.shape[:2]
    rows, columns = -(-height // _TOKEN), -(-width // _TOKEN)
    number = max(1, round(rows * columns * percent / 100))
    chosen = np.zeros(rows * columns, dtype=bool)
    chosen[random.choice(rows * columns, number, replace=False)] = True
    mask = np.kron(chosen.reshape(rows, columns), np.ones((_TOKEN, _TOKEN), dtype=bool))[:height, :width]
    return np.where(mask[..., None], blurred(image, _STALE_BLUR), image)


def pasted(image: Pixels, percent: float, random: np.random.Generator) -> Pixels:
    """Paste a square of the image turned upside down, at a quarter of its resolution."""
    top, left, side = _square(image, percent, random)
    other = reduced(image[::-1, ::-1], _COARSE)
    changed = image.copy()
    changed[top : top + side, left : left + side] = other[top : top + side, left : left + side]
    return changed


def blackened(image: Pixels, percent: float, random: np.random.Generator) -> Pixels:
    """Paint a square black."""
    top, left, side = _square(image, percent, random)
    changed = image.copy()
    changed[top : top + side, left : left + side] = 0.0
    return changed


def _square(image: Pixels, percent: float, random: np.random.Generator) -> tuple[int, int, int]:
    """Return the top, left and side of a random square that covers this share of the image."""
    height, width = image.shape[:2]
    side = min(height, width, max(1, round(float(np.sqrt(height * width * percent / 100)))))
    return int(random.integers(height - side + 1)), int(random.integers(width - side + 1)), side
