"""Statistics of a trial's samples."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from vivace.foundation.stats import Interval, Spread, median_interval

LEAST_FOR_P90 = 10
LEAST_FOR_P99 = 100


@dataclass(frozen=True)
class Latency:
    """Seconds per image over the samples of all rounds: the time of a call divided by its batch size.

    `p90_s` needs at least 10 samples and `p99_s` at least 100, so that one lies beyond; below that they are None.
    """

    median: Interval
    mean_s: float
    min_s: float
    max_s: float
    p90_s: float | None
    p99_s: float | None
    samples_s: tuple[tuple[float, ...], ...]

    @property
    def n(self) -> int:
        return sum(len(r) for r in self.samples_s)

    def to_json(self) -> dict[str, Any]:
        return {
            "median_s": self.median.point,
            "ci95_s": ends_of(self.median),
            "mean_s": self.mean_s,
            "min_s": self.min_s,
            "max_s": self.max_s,
            "p90_s": self.p90_s,
            "p99_s": self.p99_s,
            "n": self.n,
            "samples_s": [list(r) for r in self.samples_s],
        }


def latency_of(samples: tuple[tuple[float, ...], ...], spread: Spread) -> Latency:
    pooled = sorted(x for r in samples for x in r)
    return Latency(
        median=median_interval(samples, spread),
        mean_s=statistics.fmean(pooled),
        min_s=pooled[0],
        max_s=pooled[-1],
        p90_s=_percentile(pooled, 0.90) if len(pooled) >= LEAST_FOR_P90 else None,
        p99_s=_percentile(pooled, 0.99) if len(pooled) >= LEAST_FOR_P99 else None,
        samples_s=samples,
    )


def _percentile(ordered: list[float], share: float) -> float:
    """Return the smallest sample that at least `share` of the samples do not exceed."""
    return ordered[min(len(ordered) - 1, max(0, -(-int(len(ordered) * share * 1000) // 1000) - 1))]


def ends_of(interval: Interval) -> list[float] | None:
    return None if interval.low is None or interval.high is None else [interval.low, interval.high]
