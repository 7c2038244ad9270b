"""Means and paired differences of means, over images that come in groups."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

from vivace.foundation.stats.intervals import Interval, student_t

MIN_GROUPS = 6
"""Least number of groups: with fewer, Student's factor alone is above 2.5, and one odd group decides."""


def mean_interval(
    values: Sequence[float], groups: Sequence[Hashable] | None = None, coverage: float = 0.95
) -> Interval:
    """Return the mean with its interval. For paired differences it tells whether the pairs differ on average.

    Images of one prompt are correlated, so the interval counts prompts: the variance is that of the groups'
    sums around the mean, as in a sample of clusters (Liang and Zeger 1986), with as many degrees of freedom as groups
    less one. Without groups each value is its own.

    Args:
        groups: what each value belongs to, e.g. its prompt.
        coverage: coverage of the interval. At 0.9 each end is a one-sided 95 % bound, as one-sided limits need.
    """
    if not len(values):
        raise ValueError("no values")
    array = np.asarray(values, dtype=np.float64)
    point = float(array.mean())
    names = range(len(array)) if groups is None else groups
    number = {name: k for k, name in enumerate(dict.fromkeys(names))}
    if len(number) < MIN_GROUPS:
        return Interval(point, None, None)
    index = [number[name] for name in names]
    sums = np.bincount(index, weights=array - point, minlength=len(number))
    error = math.sqrt(len(number) / (len(number) - 1) * float((sums**2).sum())) / len(array)
    reach = student_t(0.5 + coverage / 2, len(number) - 1) * error
    return Interval(point, point - reach, point + reach)
