"""Resampling of samples that depend on their neighbours: the circular block bootstrap.

Latencies of a queue follow each other: a long image delays those behind it. Drawing single samples would ignore that
and give intervals that are too narrow, so blocks of neighbours are drawn instead (Politis and Romano 1992). A block
is twice as long as the samples remember, judged by their integrated autocorrelation.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

MIN_BLOCKS = 5
"""Least number of blocks: samples with fewer have no interval."""
_DRAWS = 1000


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
