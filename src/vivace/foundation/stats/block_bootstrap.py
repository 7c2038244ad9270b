"""Intervals of any statistic of samples that depend on their neighbours: the circular block bootstrap.

Latencies of a queue follow each other: a long image delays those behind it. Drawing single samples would ignore that
and give intervals that are too narrow, so blocks of neighbours are drawn instead (Politis and Romano 1992). A block
is twice as long as the samples remember, judged by their integrated autocorrelation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from vivace.foundation.stats.intervals import Interval

MIN_BLOCKS = 5
"""Least number of blocks: samples with fewer have no interval."""
_DRAWS = 1000

Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""A statistic, which reduces the last axis."""


def block_length(values: NDArray[np.float64], least: int = 1) -> int:
    """Return the length of the blocks that are drawn.

    Args:
        least: neighbours that surely depend on each other, e.g. those of one batch.
    """
    n = len(values)
    return min(n, math.ceil(max(float(least), math.cbrt(n), 2 * _memory(values))))


def _memory(values: NDArray[np.float64]) -> float:
    """Return the integrated autocorrelation of the ranks, up to the first lag at which it is within noise."""
    n = len(values)
    ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(np.float64)
    ranks -= ranks.mean()
    power = float((ranks**2).sum())
    if n < 8 or power == 0 or np.ptp(values) == 0:
        return 1.0
    total = 1.0
    for lag in range(1, n // 2):
        correlation = float((ranks[lag:] * ranks[:-lag]).sum()) / power
        if correlation < 1.64 / math.sqrt(n):
            break
        total += 2 * correlation
    return total


def block_interval(
    values: Sequence[float] | NDArray[np.float64],
    statistic: Statistic,
    *,
    least_block: int = 1,
    seed: int = 0,
) -> Interval:
    """Return a statistic of samples with its 95 % interval; no interval where the samples hold too few blocks.

    Args:
        values: in the order of measurement, at least one.
        statistic: of an array, along its last axis.
        least_block: see `block_length`.
        seed: of the draws, so that one record has one interval.
    """
    samples = np.asarray(values, dtype=np.float64)
    point = float(statistic(samples))
    length = block_length(samples, least_block)
    draws = resampled(samples, length, seed)
    if draws is None:
        return Interval(point, None, None)
    low, high = np.quantile(statistic(draws), (0.025, 0.975))
    return Interval(point, float(low), float(high))


def resampled(samples: NDArray[np.float64], length: int, seed: int = 0) -> NDArray[np.float64] | None:
    """Return a thousand samples of the same size, made of blocks; None where there are too few blocks."""
    n = len(samples)
    if n // length < MIN_BLOCKS:
        return None
    random = np.random.default_rng(seed)
    starts = random.integers(0, n, (_DRAWS, -(-n // length)))
    places = (starts[:, :, None] + np.arange(length)) % n
    chosen: NDArray[np.float64] = samples[places.reshape(_DRAWS, -1)[:, :n]]
    return chosen


def block_ratio(
    a: Sequence[float] | NDArray[np.float64],
    b: Sequence[float] | NDArray[np.float64],
    statistic: Statistic,
    *,
    least_block: int = 1,
) -> Interval:
    """Return a statistic of `a` over that of `b`, which were measured independently; see `block_interval`."""
    both = [np.asarray(values, dtype=np.float64) for values in (a, b)]
    point = float(statistic(both[0]) / statistic(both[1]))
    draws = [resampled(values, block_length(values, least_block), seed) for seed, values in enumerate(both)]
    if draws[0] is None or draws[1] is None:
        return Interval(point, None, None)
    low, high = np.quantile(statistic(draws[0]) / statistic(draws[1]), (0.025, 0.975))
    return Interval(point, float(low), float(high))
