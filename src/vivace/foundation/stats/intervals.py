"""Intervals of medians: of one round's samples, and over rounds that each have a process of their own.

A round's samples share a process and a stretch of time, so they agree with each other better than with the next
process. The interval over rounds is therefore Student's, on one value per round: its logarithmic median. Two rounds say
little about how much processes differ, so the variance starts from a prior (`Spread`) worth a few observations; where
they contradict it, it is left out.
`benchmarks/coverage.py` simulates the coverage of the intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

MIN_SAMPLES = 3
"""Least number of samples: fewer have no interval."""
_MAX_AUTOCORRELATION = 0.9
_CONTRADICTED = 8.0
"""Times the assumed variance at which rounds speak for themselves: chance gives two rounds that in one of twenty."""


@dataclass(frozen=True)
class Interval:
    """A point estimate with its 95 % interval; `low` and `high` are None if there were too few samples."""

    point: float
    low: float | None
    high: float | None

    @property
    def half_width(self) -> float | None:
        """Half the width of the interval, relative to the point estimate."""
        if self.low is None or self.high is None or self.point == 0:
            return None
        return (self.high - self.low) / 2 / abs(self.point)


@dataclass(frozen=True)
class Spread:
    """Prior of the differences between processes that do the same.

    Attributes:
        sd: standard deviation of the logarithm of a process's median: 0.02 is 2 %.
        dof: how many observations the assumption is worth.
    """

    sd: float
    dof: float


DEFAULT_SPREAD = Spread(0.02, 4)
"""Spread without other knowledge. Processes differ by 1 to 3 % on shared two-core servers."""


@dataclass(frozen=True)
class LogMean:
    """The mean of a logarithm over rounds, Student-distributed.

    Attributes:
        error: its standard error; None if there were too few samples.
    """

    mean: float
    error: float | None
    dof: float

    def interval(self, coverage: float = 0.95) -> Interval:
        """Return the interval of the exponential."""
        point = math.exp(self.mean)
        if self.error is None:
            return Interval(point, None, None)
        reach = student_t(0.5 + coverage / 2, self.dof) * self.error
        return Interval(point, math.exp(self.mean - reach), math.exp(self.mean + reach))


def median_interval(groups: Sequence[Sequence[float]], spread: Spread = DEFAULT_SPREAD) -> Interval:
    """Return the typical time with its 95 % interval: the geometric mean of the rounds' medians.

    With one round the interval is that of its process only.

    Args:
        groups: samples by round.
    """
    rounds = [np.asarray(group, dtype=np.float64) for group in groups if len(group)]
    if not rounds:
        raise ValueError("no samples")
    logs = [float(np.log(np.median(r))) for r in rounds]
    errors = [log_error(r) for r in rounds]
    enough = sum(len(r) for r in rounds) >= MIN_SAMPLES
    return mean_over_rounds(logs, errors if enough else None, spread.sd**2, spread.dof).interval()


def mean_over_rounds(
    logs: Sequence[float], errors: Sequence[float] | None, variance: float, dof: float
) -> LogMean:
    """Return the mean of one value per round.

    Args:
        logs: by round.
        errors: their standard errors within a round, by round; None if there were too few samples.
        variance: prior variance between processes.
        dof: what the prior is worth, in observations.
    """
    number = len(logs)
    mean = sum(logs) / number
    if errors is None:
        return LogMean(mean, None, dof)
    within = sum(error**2 for error in errors) / number
    if number == 1:
        return LogMean(mean, math.sqrt(within), math.inf)
    observed = sum((log - mean) ** 2 for log in logs)
    if observed / (number - 1) > _CONTRADICTED * (variance + within):
        return LogMean(mean, math.sqrt(observed / (number - 1) / number), number - 1)
    total = (dof * (variance + within) + observed) / (dof + number - 1)
    return LogMean(mean, math.sqrt(total / number), dof + number - 1)


def log_error(samples: Sequence[float] | NDArray[np.float64]) -> float:
    """Return the standard error of the logarithm of the samples' median.

    From two order statistics around the median (Price and Bonett 2001), so that a few outliers do not matter. It grows
    by the autocorrelation of the samples, as a slow phase of the machine lasts for several of them.

    Args:
        samples: in the order of measurement.
    """
    logs = np.log(np.asarray(samples, dtype=np.float64))
    n = len(logs)
    if n < 2:
        return 0.0
    rank = max(1, round((n + 1) / 2 - math.sqrt(n)))
    z = NormalDist().inv_cdf(1 - _tails(n, rank) / 2)
    ordered = np.sort(logs)
    error = float(ordered[n - rank] - ordered[rank - 1]) / (2 * z)
    correlation = autocorrelation(logs)
    return error * math.sqrt((1 + correlation) / (1 - correlation))


def _tails(n: int, rank: int) -> float:
    """Return the probability that fewer than `rank` of n fair coins show heads, or fewer than `rank` tails.

    In whole numbers: floats end at the binomial coefficients of a thousand samples.
    """
    ways, total = 1, 0
    for i in range(rank):
        total += ways
        ways = ways * (n - i) // (i + 1)
    return total / (1 << (n - 1))


def autocorrelation(values: NDArray[np.float64]) -> float:
    """Return the correlation of neighbours between 0 and 0.9; 0 for fewer than 8 values, which are too few to tell."""
    n = len(values)
    if n < 8:
        return 0.0
    # Ranks, so that a single spike is no more than the largest value.
    ranks = np.argsort(np.argsort(values)).astype(np.float64)
    ranks -= ranks.mean()
    correlation = float((ranks[1:] * ranks[:-1]).sum() / (ranks**2).sum())
    # The estimate is too low by (1 + 4 * correlation) / n (Marriott and Pope 1954).
    correlation = (n * correlation + 1) / (n - 4)
    # What chance alone gives to independent samples does not widen the interval.
    return min(_MAX_AUTOCORRELATION, correlation) if correlation > 1.64 / math.sqrt(n) else 0.0


def student_t(probability: float, dof: float) -> float:
    """Return the quantile of Student's distribution: exact for 1 and 2, else by Cornish and Fisher's expansion, within
    2 % for 3 and within 1 % for more."""
    z = NormalDist().inv_cdf(probability)
    if math.isinf(dof):
        return z
    if dof == 1:
        return math.tan(math.pi * (probability - 0.5))
    if dof == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    return (
        z
        + (z**3 + z) / (4 * dof)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * dof**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * dof**3)
    )
