"""Bootstrap intervals, seeded so that the same samples always give the same interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 4000
MIN_SAMPLES = 3  # below this, a bootstrap interval of the median would only be the range


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


def resampled_medians(samples: Sequence[float], generator: np.random.Generator) -> NDArray[np.float64]:
    """Return medians of NUM_RESAMPLES resamples with replacement, shape (NUM_RESAMPLES,)."""
    values = np.asarray(samples, dtype=np.float64)
    picks = generator.integers(0, len(values), size=(NUM_RESAMPLES, len(values)))
    return np.asarray(np.median(values[picks], axis=1))


def median_interval(groups: Sequence[Sequence[float]]) -> Interval:
    """Return the median of all samples with a 95 % bootstrap interval.

    Args:
        groups: samples by round. Samples of one round share a process and a time, so the bootstrap resamples rounds
            and then samples within them. Rounds that disagree widen the interval.
    """
    rounds = [np.asarray(g, dtype=np.float64) for g in groups if len(g)]
    if not rounds:
        raise ValueError("no samples")
    pooled = np.concatenate(rounds)
    point = float(np.median(pooled))
    if len(pooled) < MIN_SAMPLES:
        return Interval(point, None, None)
    generator = np.random.default_rng(0)
    longest = max(len(r) for r in rounds)
    picked = generator.integers(0, len(rounds), size=(NUM_RESAMPLES, len(rounds), 1))
    # Samples by (round, index). Rows of unequal length are padded; the padding is never picked.
    padded = np.stack([np.pad(r, (0, longest - len(r))) for r in rounds])
    lengths = np.array([len(r) for r in rounds])[picked]
    index = (generator.random((NUM_RESAMPLES, len(rounds), longest)) * lengths).astype(np.int64)
    medians = np.median(padded[picked, index].reshape(NUM_RESAMPLES, -1), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Interval(point, float(low), float(high))
