"""Two one-sided tests (TOST, Schuirmann 1987): is a mean difference within a margin, or beyond it?

"No significant difference" proves nothing: few images never show one. A test of equivalence turns the question round.
The difference is within the margin if its whole 90 % interval is, which wrongly happens in at most 5 % of cases.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist

import numpy as np

from vivace.foundation.stats.intervals import Interval, student_t

_POWER = 0.8
_MOST_GROUPS = 10_000
MIN_GROUPS = 6
"""Least number of groups: with fewer, Student's factor alone is above 2.5, and one odd group decides."""


class Equivalence(StrEnum):
    """Where a mean difference lies."""

    WITHIN = "within"
    BELOW = "below"
    ABOVE = "above"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class EquivalenceTest:
    """The result of a test.

    Attributes:
        interval: the mean difference with its 90 % interval; without ends if there were too few groups.
        needed: how many groups would probably decide (in 4 of 5 cases); None if it is decided or cannot be estimated.
    """

    verdict: Equivalence
    interval: Interval
    margin: float
    num_groups: int
    needed: int | None


def equivalence(
    differences: Sequence[float], groups: Sequence[Hashable], margin: float, beyond: float = 0.99
) -> EquivalenceTest:
    """Test whether paired differences are on average within -margin .. margin.

    Args:
        groups: what each difference belongs to, e.g. its prompt; see `mean_interval`.
        beyond: confidence with which a mean must lie beyond the margin to be called so. It is higher than that of
            `within`, since several tests are made of the same images and a false alarm costs more than another look.
    """
    number = len(set(groups))
    interval = mean_interval(differences, groups, 0.9)
    if not any(differences):
        return EquivalenceTest(Equivalence.WITHIN, Interval(0.0, 0.0, 0.0), margin, number, None)
    if interval.low is None or interval.high is None:
        return EquivalenceTest(Equivalence.UNCLEAR, interval, margin, number, MIN_GROUPS)
    wide = mean_interval(differences, groups, 2 * beyond - 1)
    assert wide.low is not None
    assert wide.high is not None
    if -margin < interval.low and interval.high < margin:
        verdict = Equivalence.WITHIN
    elif wide.high < -margin:
        verdict = Equivalence.BELOW
    elif wide.low > margin:
        verdict = Equivalence.ABOVE
    else:
        verdict = Equivalence.UNCLEAR
    needed = (
        _needed(differences, groups, interval.point, margin, beyond)
        if verdict is Equivalence.UNCLEAR
        else None
    )
    return EquivalenceTest(verdict, interval, margin, number, needed)


def _needed(
    differences: Sequence[float], groups: Sequence[Hashable], mean: float, margin: float, beyond: float
) -> int | None:
    """Return how many groups like these would probably decide; None if it would take too many."""
    by_group: dict[Hashable, list[float]] = {}
    for group, difference in zip(groups, differences, strict=True):
        by_group.setdefault(group, []).append(difference)
    spread = float(np.std([sum(values) / len(values) for values in by_group.values()], ddof=1))
    distance = abs(margin - abs(mean))
    confidence = 0.95 if abs(mean) < margin else beyond
    quantiles = NormalDist().inv_cdf(confidence) + NormalDist().inv_cdf(_POWER)
    if distance <= quantiles * spread / math.sqrt(_MOST_GROUPS):
        return None
    return max(MIN_GROUPS, len(by_group) + 1, math.ceil((quantiles * spread / distance) ** 2))


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
