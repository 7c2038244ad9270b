"""Intervals of samples that depend on their neighbours."""

import numpy as np
import pytest
from numpy.typing import NDArray

from vivace.foundation.stats import block_interval, block_length, block_ratio


def mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.mean(values, axis=-1))


def autoregressive(random: np.random.Generator, n: int, memory: float) -> NDArray[np.float64]:
    values = np.empty(n)
    value = random.normal() / np.sqrt(1 - memory**2)
    for place in range(n):
        value = memory * value + random.normal()
        values[place] = value
    return values


@pytest.mark.parametrize("memory", [0.0, 0.6])
def test_intervals_hold_the_truth_about_as_often_as_they_say(memory: float) -> None:
    random = np.random.default_rng(3)
    hits = 0
    for _ in range(150):
        interval = block_interval(autoregressive(random, 300, memory), mean)
        assert interval.low is not None
        assert interval.high is not None
        hits += interval.low <= 0 <= interval.high
    assert hits / 150 > 0.85


def test_neighbours_that_are_alike_are_drawn_together() -> None:
    random = np.random.default_rng(4)
    independent, dependent = autoregressive(random, 400, 0.0), autoregressive(random, 400, 0.9)
    assert block_length(independent) < 12 < block_length(dependent)
    assert block_length(independent, least=30) == 30


def test_few_blocks_have_no_interval_and_one_record_has_one() -> None:
    values = np.arange(12.0) % 5
    assert block_interval(values, mean, least_block=4).low is None
    assert block_interval(values, mean) == block_interval(values, mean)


def test_a_ratio_of_independent_measurements() -> None:
    random = np.random.default_rng(5)
    ratio = block_ratio(random.normal(4, 0.1, 200), random.normal(2, 0.1, 200), mean)
    assert ratio.point == pytest.approx(2, rel=0.02)
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low < 2 < ratio.high < 2.1
