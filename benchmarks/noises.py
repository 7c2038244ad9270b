"""Simulated rounds: how calls vary within a process, processes among each other, and the machine over time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vivace.foundation.stats import enough_samples

MOST = 30
"""Timed calls of a round at most."""
PROCESS_SDS = (0.0, 0.01, 0.03)
MACHINE_SD = 0.05

Values = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Values]


def _gaussian(generator: np.random.Generator, number: int) -> Values:
    return 1 + 0.01 * generator.standard_normal(number)


def _skewed(generator: np.random.Generator, number: int) -> Values:
    return np.asarray(1 + 0.02 * (generator.exponential(size=number) - np.log(2)))


def _spiky(generator: np.random.Generator, number: int) -> Values:
    return _gaussian(generator, number) * np.where(generator.random(number) < 0.05, 1.5, 1.0)


def _autocorrelated(generator: np.random.Generator, number: int) -> Values:
    steps = 0.01 * np.sqrt(1 - 0.7**2) * generator.standard_normal(number)
    value, values = 0.01 * generator.standard_normal(), []
    for step in steps:
        value = 0.7 * value + step
        values.append(1 + value)
    return np.asarray(values)


def _drifting(generator: np.random.Generator, number: int) -> Values:
    slope = 0.02 * generator.standard_normal()
    return _gaussian(generator, number) * (1 + slope * (np.arange(number) / MOST - 0.5))


NOISES: dict[str, Draw] = {
    "Gaussian, 1 %": _gaussian,
    "skewed, 2 %": _skewed,
    "spikes of 50 %, one call in twenty": _spiky,
    "autocorrelated (0.7), 1 %": _autocorrelated,
    "drifting, 2 % over 30 calls": _drifting,
}


def draw_round(draw: Draw, generator: np.random.Generator, samples: int | None) -> Values:
    """Return the times of one round's calls; as many as the stopping rule asks for if `samples` is None."""
    drawn = draw(generator, MOST if samples is None else samples)
    if samples is not None:
        return drawn
    for number in range(6, MOST):
        if enough_samples(list(2 * drawn[:number])):
            return drawn[:number]
    return drawn
