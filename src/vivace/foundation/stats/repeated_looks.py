"""Confidence of each of several looks at the same growing data, so that all together have that of one.

Who looks again until something is decided is wrong more often than the level of each look says. With a constant
boundary at every look (Pocock 1977, Biometrika 64), the error of all looks together is what was asked for. The looks
have to be fixed beforehand: they are numbers of observations, and do not depend on what was observed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

_REACH = 8.0  # of the statistic's distribution, in standard deviations
_POINTS = 401
_HALVINGS = 16


def sure_of_each(sure: float, sizes: Sequence[int]) -> float:
    """Return the one-sided confidence of each look, so that all together have the confidence `sure`.

    Args:
        sizes: observations at each look, growing.
    """
    return _sure_of_each(sure, tuple(sizes))


@lru_cache(maxsize=64)
def _sure_of_each(sure: float, sizes: tuple[int, ...]) -> float:
    if len(sizes) < 2:
        return sure
    # The density of the sum of the observations is carried from look to look on a grid.
    grid = np.linspace(-_REACH, _REACH, _POINTS) * math.sqrt(sizes[-1])
    width = float(grid[1] - grid[0])
    apart = grid[:, None] - grid[None, :]
    first = _normal(grid, math.sqrt(sizes[0]))
    steps = [
        width * _normal(apart, math.sqrt(size - before))
        for size, before in zip(sizes[1:], sizes, strict=False)
    ]

    def stays_below(boundary: float) -> float:
        """Return the probability that the standardised mean is below the boundary at every look."""
        density = first
        for step, before in zip(steps, sizes, strict=False):
            density = step @ np.where(grid < boundary * math.sqrt(before), density, 0.0)
        return float(density[grid < boundary * math.sqrt(sizes[-1])].sum() * width)

    low, high = NormalDist().inv_cdf(sure), NormalDist().inv_cdf(1 - (1 - sure) / len(sizes))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if stays_below(middle) < sure else (low, middle)
    return NormalDist().cdf(high)


def _normal(x: NDArray[np.float64], sd: float) -> NDArray[np.float64]:
    density: NDArray[np.float64] = np.exp(-0.5 * (x / sd) ** 2) / (sd * math.sqrt(2 * math.pi))
    return density
