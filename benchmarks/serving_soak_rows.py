"""Rows of `benchmarks.serving_soak`: what each run of a server came to, and the lines that the parts say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.block_bootstrap import block_length, resampled
from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.environment import Environment
from vivace.foundation.stats.intervals import Interval

Part = Literal["memory", "leaving", "overload"]
_MB = 1e6
_SETTLED = 0.25
"""Of the points of a run, which are left out: allocators and caches fill."""
_FEWEST = 20
"""Points of a run that says how much it grew."""


class MemoryPoint(Spec):
    """Memory after so many requests of a run: of all worker processes, of the server's, and of the GPU."""

    requests: int
    worker_bytes: int
    server_bytes: int
    gpu_bytes: int | None = None


class SoakRow(Spec):
    """What a part of a soak came to on one run of the server.

    Attributes:
        part: "memory" is requests of every kind; "leaving" are clients that go away at random; "overload" is ten times
            more than can be drawn.
        began: of the run, in UTC.
        seconds: that it took.
        statuses: of the answers, by their number; 499 are clients that went away.
        points: of "memory", as it went on.
        rates: images a second without load and with it, of "overload".
        restarts: of workers.
    """

    model: str
    recipe: str
    environment: Environment
    part: Part
    began: str
    seconds: float
    statuses: dict[str, int]
    points: tuple[MemoryPoint, ...] = ()
    rates: tuple[float, float] | None = None
    restarts: int = 0

    @property
    def requests(self) -> int:
        return sum(self.statuses.values())

    @property
    def lines(self) -> list[str]:
        counts = ", ".join(f"{number} of {status}" for status, number in sorted(self.statuses.items()))
        whole = f"{self.part}: {self.requests} requests in {self.seconds:.0f} s"
        first = f"{whole} ({counts}), {self.restarts} workers lost"
        return [first, *(_memory_lines(self.points) if self.points else ()), *_rate_lines(self.rates)]


def _memory_lines(points: Sequence[MemoryPoint]) -> list[str]:
    requests = [point.requests for point in points]
    columns = {
        "worker": [point.worker_bytes for point in points],
        "server": [point.server_bytes for point in points],
        "GPU": [point.gpu_bytes for point in points if point.gpu_bytes is not None],
    }
    lines = []
    for name, values in columns.items():
        if len(values) == len(points):
            ends = f"{values[0] / _MB:.1f} MB at first, {values[-1] / _MB:.1f} MB at last"
            lines.append(f"  {name}: {ends}{_growth_text(requests, values)}")
    return lines


def _growth_text(requests: Sequence[int], values: Sequence[float]) -> str:
    if len(values) < _FEWEST:
        return ""
    slope = growth(requests, values)
    between = (
        ""
        if slope.low is None or slope.high is None
        else f" [{slope.low / _MB:+.3f}, {slope.high / _MB:+.3f}]"
    )
    return f"; once settled {slope.point / _MB:+.3f}{between} MB in 1,000 requests"


def _rate_lines(rates: tuple[float, float] | None) -> list[str]:
    if rates is None:
        return []
    alone, loaded = rates
    return [f"  {loaded:.2f} images a second, {alone:.2f} without load: {loaded / alone:.3f}"]


def growth(requests: Sequence[int], values: Sequence[float]) -> Interval:
    """Return the bytes that 1,000 requests add, by least squares over what is settled, with a 95 % interval.

    The interval is of a block bootstrap of the residuals, since what an allocator holds depends on what it held.
    """
    settled = int(len(values) * _SETTLED)
    x = np.asarray(requests[settled:], dtype=np.float64) / 1000
    y = np.asarray(values[settled:], dtype=np.float64)
    if len(x) < 2:
        return Interval(0.0, None, None)
    slope = float(_slopes(x, y))
    residuals = y - y.mean() - slope * (x - x.mean())
    draws = resampled(residuals, block_length(residuals))
    if draws is None:
        return Interval(slope, None, None)
    low, high = np.quantile(slope + _slopes(x, draws), (0.025, 0.975))
    return Interval(slope, float(low), float(high))


def _slopes(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    centred = x - x.mean()
    slopes: NDArray[np.float64] = np.asarray(y @ centred / (centred @ centred))
    return slopes
