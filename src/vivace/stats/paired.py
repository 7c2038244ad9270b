"""Means and paired differences of means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vivace.stats.intervals import MIN_SAMPLES, NUM_RESAMPLES, Interval


def mean_interval(values: Sequence[float], coverage: float = 0.95) -> Interval:
    """The mean with a bootstrap interval. Of paired differences: whether the pairs differ on average.

    Args:
        coverage: of the interval. With 0.9 either end alone is 95 % sure, which is what a limit on one side asks.
    """
    if not len(values):
        raise ValueError("no values")
    array = np.asarray(values, dtype=np.float64)
    point = float(array.mean())
    if len(array) < MIN_SAMPLES:
        return Interval(point, None, None)
    generator = np.random.default_rng(0)
    means = array[generator.integers(0, len(array), size=(NUM_RESAMPLES, len(array)))].mean(axis=1)
    low, high = np.percentile(means, [50 * (1 - coverage), 50 * (1 + coverage)])
    return Interval(point, float(low), float(high))
