"""Intervals of means over prompts: simulated images of one prompt that suffer together."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from vivace.foundation.stats import MIN_GROUPS, mean_interval

TRIALS = 1500
Drawn = Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.float64]]


def normal(random: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    return random.normal(0, 1, shape)


def skewed(random: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Most lose a little, some a lot; mean 0, variance 1."""
    return 1 - random.exponential(1, shape)


def covered(
    prompts: list[int], correlation: float, draw: Drawn, coverage: float, grouped: bool = True
) -> float:
    """The share of simulated studies whose interval holds the true mean, 0.

    Args:
        prompts: number of images of each.
        correlation: of the images of one prompt.
    """
    random = np.random.default_rng(1)
    groups = [k for k, number in enumerate(prompts) for _ in range(number)]
    hits = 0
    for _ in range(TRIALS):
        shared = draw(random, (len(prompts),))[groups]
        own = draw(random, (len(groups),))
        values = np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * own
        interval = mean_interval(list(values), groups if grouped else None, coverage)
        assert interval.low is not None
        assert interval.high is not None
        hits += interval.low <= 0 <= interval.high
    return hits / TRIALS


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("prompts", [[1] * 13, [3] * 13, [3] * 6, [3] * 13 + [1] * 61])
def test_intervals_over_prompts_cover(prompts: list[int], correlation: float) -> None:
    assert 0.925 <= covered(prompts, correlation, normal, 0.95) <= 0.975
    assert 0.875 <= covered(prompts, correlation, normal, 0.9) <= 0.93


def test_rare_large_losses_are_covered_nearly_as_often() -> None:
    assert 0.87 <= covered([3] * 13, 0.9, skewed, 0.95) <= 0.97
    assert 0.9 <= covered([1] * 100, 0.0, skewed, 0.95) <= 0.97


def test_images_counted_as_if_independent_do_not_cover() -> None:
    assert covered([3] * 13, 0.9, normal, 0.95, grouped=False) < 0.8


def test_the_same_images_thrice_prove_no_more() -> None:
    values = [0.1, 0.5, 0.3, 0.9, 0.2, 0.7]
    once, thrice = mean_interval(values), mean_interval(values * 3, list(range(6)) * 3)
    assert thrice.point == pytest.approx(once.point)
    assert thrice.low == pytest.approx(once.low)
    assert thrice.high == pytest.approx(once.high)


def test_few_prompts_have_no_interval() -> None:
    assert mean_interval([1.0, 2.0] * 50, [0, 1] * 50).low is None
    values = list(range(MIN_GROUPS))
    assert mean_interval(values[1:]).low is None
    assert mean_interval(values).low is not None
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])
