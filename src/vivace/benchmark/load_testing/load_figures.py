"""Figures of a load, computed from its raw samples: throughput, latency and goodput with intervals."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vivace.benchmark.load_testing.load_rows import DONE, LoadRow
from vivace.foundation.stats.block_bootstrap import block_interval, block_length, block_ratio
from vivace.foundation.stats.intervals import Interval

PERCENTILES = (50, 90, 95, 99)
_LEAST_BEYOND = 5
"""Least number of samples above a percentile; with fewer, the largest sample alone would decide its interval."""
_DOUBT = 0.025


@dataclass(frozen=True)
class LoadFigures:
    """Figures of a load.

    Attributes:
        num_requests: that were due; `num_done` brought an image, `errors` counts the others by kind.
        throughput: images a second.
        latency_s: seconds by percentile, of the requests that brought an image.
        within_slo: the share of all requests whose image came in time; None without an SLO.
        goodput: images a second that came in time, of Poisson arrivals; None for others.
        lag_s: the 99th percentile of how much later than due requests left: what the load itself adds to latency.
        phases_ms: medians of the server's own Server-Timing.
    """

    num_requests: int
    num_done: int
    errors: dict[str, int]
    throughput: Interval
    latency_s: dict[int, Interval]
    within_slo: Interval | None
    goodput: Interval | None
    lag_s: float
    phases_ms: dict[str, float]


def figures_of(row: LoadRow) -> LoadFigures:
    """Return the figures of a load."""
    samples = row.samples
    done = np.array([outcome == DONE for outcome in samples.outcome], dtype=bool)
    ended, due = (np.array(column, dtype=np.float64) for column in (samples.ended_s, samples.due_s))
    latencies = np.round(ended - due, 5)
    within = _within(row, done, latencies)
    goodput = None
    if within is not None and row.rate is not None:
        goodput = _scaled(within, row.rate)
    return LoadFigures(
        num_requests=len(done),
        num_done=int(done.sum()),
        errors=dict(Counter(kind for kind in samples.outcome if kind != DONE).most_common()),
        throughput=throughput(row),
        latency_s={p: _percentile(latencies[done], p, row.stage.clients or 1) for p in PERCENTILES}
        if done.any()
        else {},
        within_slo=within,
        goodput=goodput,
        lag_s=float(np.quantile(np.subtract(samples.sent_s, samples.due_s), 0.99)) if len(done) else 0.0,
        phases_ms=_phases(row),
    )


def throughput(row: LoadRow) -> Interval:
    """Return the images a second, from the times between images."""
    gaps = _gaps(row)
    if not len(gaps):
        return Interval(0.0, None, None)
    return block_interval(gaps, _rate, least_block=row.stage.clients or 1)


def throughput_ratio(row: LoadRow, other: LoadRow) -> Interval | None:
    """Return the throughput of a load over that of another; None where one has no image."""
    gaps = _gaps(row), _gaps(other)
    if not len(gaps[0]) or not len(gaps[1]):
        return None
    return block_ratio(*gaps, _rate, least_block=row.stage.clients or 1)


def latency_ratio(row: LoadRow, other: LoadRow) -> Interval | None:
    """Return the median latency of a load over that of another; None where one has no image."""
    both = done_latencies(row), done_latencies(other)
    if not len(both[0]) or not len(both[1]):
        return None
    return block_ratio(*both, _median, least_block=row.stage.clients or 1)


def done_latencies(row: LoadRow) -> NDArray[np.float64]:
    """Return the seconds of the requests that brought an image, in the order in which they were due."""
    done = [outcome == DONE for outcome in row.samples.outcome]
    latencies: NDArray[np.float64] = np.subtract(row.samples.ended_s, row.samples.due_s)[done]
    return latencies


def lone_latencies(row: LoadRow) -> tuple[float, ...]:
    """Return the median latency of one client by variant: by size, whatever the LoRA."""
    sizes = [size for size, _ in row.request.variants]
    done = [
        (sizes[variant], ended - due)
        for variant, due, ended, outcome in zip(
            row.samples.variant, row.samples.due_s, row.samples.ended_s, row.samples.outcome, strict=True
        )
        if outcome == DONE
    ]
    if not done:
        return ()
    overall = float(np.median([seconds for _, seconds in done]))
    by_size = {size: [seconds for other, seconds in done if other == size] for size in set(sizes)}
    return tuple(float(np.median(by_size[size])) if by_size[size] else overall for size in sizes)


def _gaps(row: LoadRow) -> NDArray[np.float64]:
    """Return the seconds between images, from the first request on.

    Of a closed loop only until its last request: clients that have gone leave the server idle.
    """
    samples = row.samples
    ends = sorted(
        end for end, outcome in zip(samples.ended_s, samples.outcome, strict=True) if outcome == DONE
    )
    if row.stage.kind == "closed" and len(ends) > (row.stage.clients or 1) + 1:
        last = max(samples.sent_s)
        ends = [end for end in ends if end <= last] or ends
    return np.diff([min(samples.sent_s, default=0.0), *ends]) if ends else np.array([])


def _rate(gaps: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(1 / np.mean(gaps, axis=-1))


def _median(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.median(values, axis=-1))


def _percentile(latencies: NDArray[np.float64], percent: int, least_block: int) -> Interval:
    interval = block_interval(
        latencies, lambda values: np.percentile(values, percent, axis=-1), least_block=least_block
    )
    has_enough = len(latencies) * (100 - percent) / 100 >= _LEAST_BEYOND
    return interval if has_enough else Interval(interval.point, None, None)


def _within(row: LoadRow, done: NDArray[np.bool_], latencies: NDArray[np.float64]) -> Interval | None:
    if not row.slo_s or not len(done):
        return None
    slo = np.array(row.slo_s)[list(row.samples.variant)]
    good = done & (latencies <= slo)
    share = float(good.mean())
    length = block_length(latencies)
    if share in (0.0, 1.0):  # no draw of these shows another value: the exact interval of independent blocks
        doubt = 1 - _DOUBT ** (1 / max(1.0, len(good) / length))
        return Interval(share, max(0.0, share - doubt), min(1.0, share + doubt))
    return block_interval(
        good.astype(np.float64), lambda values: np.mean(values, axis=-1), least_block=length
    )


def _scaled(interval: Interval, factor: float) -> Interval:
    if interval.low is None or interval.high is None:
        return Interval(interval.point * factor, None, None)
    return Interval(interval.point * factor, interval.low * factor, interval.high * factor)


def _phases(row: LoadRow) -> dict[str, float]:
    phases: dict[str, float] = {}
    for name, column in row.samples.phases_ms.items():
        values = [value for value in column if value is not None and math.isfinite(value)]
        if values:
            phases[name] = float(np.median(values))
    return phases
