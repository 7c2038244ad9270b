"""Blocks of samples that depend on their neighbours."""

import numpy as np
from numpy.typing import NDArray

from benchmarks.block_bootstrap import block_length, resampled


def autoregressive(random: np.random.Generator, n: int, memory: float) -> NDArray[np.float64]:
    values = np.empty(n)
    value = random.normal() / np.sqrt(1 - memory**2)
    for place in range(n):
        value = memory * value + random.normal()
        values[place] = value
    return values


def test_neighbours_that_are_alike_are_drawn_together() -> None:
    random = np.random.default_rng(4)
    independent, dependent = autoregressive(random, 400, 0.0), autoregressive(random, 400, 0.9)
    assert block_length(independent) < 12 < block_length(dependent)
    assert block_length(independent, least=30) == 30


def test_too_few_blocks_are_not_drawn() -> None:
    values = np.arange(12.0) % 5
    assert resampled(values, 4) is None
    draws = resampled(values, 2)
    assert draws is not None
    assert draws.shape == (1000, 12)
