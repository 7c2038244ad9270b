"""The speed-up of one measured row over another, with its interval: a step of a waterfall, or a claim."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vivace.foundation.spec.environment import Place
from vivace.foundation.stats import Interval, Spread, Verdict, learn_spread, log_speedup
from vivace.foundation.stats.intervals import DEFAULT_SPREAD, LogMean
from vivace.report.host import LEAST_CPU_SHARE, allowing_for, most_stretch, stretch_of
from vivace.report.machine_speed import moves_of
from vivace.report.rows import Row


@dataclass(frozen=True)
class SpeedUp:
    """The speed-up of one row over another.

    Attributes:
        verdict: `unclear` where the measurement was disturbed.
        doubt: why the verdict is unclear, or needs a large difference; "" if only because of the interval.
        is_disturbed: whether other programs delayed one of the two, or a change of the CPU's speed between them may
            explain the difference because the GPU's waiting time is unknown.
        num_rounds: that both were measured in.
        times: seconds of the two over these rounds, whose quotient the ratio is; None if they share none.
        beside: where they share none, the times of a baseline and of the row measured beside it, for each of the two.
            The ratio is the quotient of both speed-ups.
    """

    ratio: Interval
    verdict: Verdict
    doubt: str = ""
    is_disturbed: bool = False
    num_rounds: int = 1
    times: tuple[float, float] | None = None
    beside: tuple[tuple[float, float], tuple[float, float]] | None = None

    @property
    def baseline_s(self) -> float | None:
        """The baseline's time, if `before` is a baseline that was measured beside `after`."""
        return self.times[0] if self.times is not None else None if self.beside is None else self.beside[1][0]


def speed_up(
    before: Row, after: Row, baselines: Sequence[Row] = (), spread: Spread = DEFAULT_SPREAD
) -> SpeedUp | None:
    """Return the speed-up of `after` over `before`; None if the two have no baseline in common.

    Rows that were measured in the same rounds of one GPU are compared directly. Others, e.g. of a resumed study or of
    several GPUs, are compared through their baselines, which were measured beside them.

    Args:
        baselines: the baseline's rows, one for each GPU or host, or for each set of sittings.
    """
    old, new = before.steady_s, after.steady_s
    shared = sorted(set(old) & set(new)) if _place(before) == _place(after) else []
    times, beside = None, None
    if shared:
        mean = log_speedup([old[i] for i in shared], [new[i] for i in shared], spread)
        num_rounds = len(shared)
        times = _typical(old, shared), _typical(new, shared)
    else:
        ways = [_beside(baselines, row, spread) for row in (before, after)]
        if ways[0] is None or ways[1] is None:
            return None
        (to_old, rounds_old, times_old), (to_new, rounds_new, times_new) = ways[0], ways[1]
        mean = _difference(to_new, to_old)
        num_rounds = min(rounds_old, rounds_new)
        beside = times_old, times_new
    drift = _cpu_ratio(before, after)
    stretch = (
        1.0 if after.latency is None else stretch_of(after.latency.median.point, after.gpu_busy_s, drift)
    )
    held_up = any(row.cpu_share is not None and row.cpu_share < LEAST_CPU_SHARE for row in (before, after))
    if held_up:
        doubt = "another program kept the CPU busy"
        return SpeedUp(mean.interval(), Verdict.UNCLEAR, doubt, True, num_rounds, times, beside)
    ratio, verdict_ = allowing_for(
        most_stretch(drift or 1.0) if stretch is None else stretch, mean, num_rounds
    )
    if stretch is None and verdict_ is Verdict.UNCLEAR:
        return SpeedUp(ratio, verdict_, _told(drift), True, num_rounds, times, beside)
    doubts = ["one round only"] if num_rounds < 2 else []
    if stretch != 1.0:
        doubts.append(f"{_told(drift)}, which the interval allows for")
    return SpeedUp(ratio, verdict_, "; ".join(doubts), num_rounds=num_rounds, times=times, beside=beside)


def _beside(
    baselines: Sequence[Row], row: Row, spread: Spread
) -> tuple[LogMean, int, tuple[float, float]] | None:
    """Return the speed-up over the baseline of the same place, the number of its rounds, and both times."""
    new = row.steady_s
    for baseline in baselines:
        old = baseline.steady_s
        shared = sorted(set(old) & set(new)) if _place(baseline) == _place(row) else []
        if shared:
            ratio = log_speedup([old[i] for i in shared], [new[i] for i in shared], spread)
            return ratio, len(shared), (_typical(old, shared), _typical(new, shared))
    return None


def _typical(samples: Mapping[int, Sequence[float]], rounds: Sequence[int]) -> float:
    """Return the geometric mean of the rounds' medians: the quotient of two is the speed-up over these rounds."""
    return math.exp(statistics.fmean(math.log(statistics.median(samples[i])) for i in rounds))


def _difference(mean: LogMean, other: LogMean) -> LogMean:
    """Return the difference of two independent means."""
    error = None if mean.error is None or other.error is None else math.hypot(mean.error, other.error)
    return LogMean(mean.mean - other.mean, error, min(mean.dof, other.dof))


def spread_of(rows: Iterable[Row]) -> Spread:
    """Return the spread between processes, estimated from rows that were measured beside each other."""
    spread = DEFAULT_SPREAD
    by_place: dict[Place | None, list[Row]] = {}
    for row in rows:
        if row.steady_s:
            by_place.setdefault(_place(row), []).append(row)
    for group in by_place.values():
        spread = learn_spread([r.steady_s for r in group], spread, moves_of([r.record for r in group]))
    return spread


def _place(row: Row) -> Place | None:
    return row.record.environment.place


def _cpu_ratio(before: Row, after: Row) -> float | None:
    """Return the time of a fixed Python loop beside `after` over that beside `before`; None if unknown."""
    return after.cpu_ratio / before.cpu_ratio if after.cpu_ratio and before.cpu_ratio else None


def _told(ratio: float | None) -> str:
    change = math.exp(abs(math.log(ratio))) if ratio else 1.0
    return f"the CPU's speed changed by {change:.1f} times between the two"
