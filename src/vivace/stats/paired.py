"""Means and paired differences of means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vivace.stats.intervals import MIN_SAMPLES, Interval

NUM_RESAMPLES = 4000


def mean_interval(values: Sequence[float], coverage: float = 0.95) -> Interval:
    """Return the mean with a bootstrap interval. For paired differences it tells whether the pairs differ on average.

    Args:
        coverage: coverage of the interval. At 0.9 each end is a one-sided 95 % bound, as one-sided limits need.
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
