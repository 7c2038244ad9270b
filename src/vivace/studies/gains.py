"""The speed-up of one measured row over another, with its interval: a step of a waterfall, or a claim."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from vivace.report.rows import CPU_DRIFT, LEAST_CPU_SHARE, Row
from vivace.stats import Interval, Spread, Verdict, learn_spread, log_speedup, verdict
from vivace.stats.intervals import DEFAULT_SPREAD


@dataclass(frozen=True)
class SpeedUp:
    """How many times as fast a row is as another; the verdict is `unclear` where the measurement was disturbed."""

    ratio: Interval
    verdict: Verdict


def speed_up(before: Row, after: Row, spread: Spread = DEFAULT_SPREAD) -> SpeedUp | None:
    """Return the speed-up of `after` over `before`; None if they share no measured round."""
    old, new = _samples(before), _samples(after)
    shared = sorted(set(old) & set(new))
    if not shared:
        return None
    found = log_speedup([old[i] for i in shared], [new[i] for i in shared], spread)
    said = Verdict.UNCLEAR if _disturbed(before, after) else verdict(found, len(shared))
    return SpeedUp(found.interval(), said)


def spread_of(rows: Iterable[Row]) -> Spread:
    """Return how much processes differ, learnt from rows that were measured beside each other."""
    return learn_spread([samples for row in rows if (samples := _samples(row))])


def _samples(row: Row) -> dict[int, tuple[float, ...]]:
    if row.latency is None:
        return {}
    batch = row.record.trial.workload.batch
    return {r.index: tuple(s.total_s / batch for s in r.samples) for r in row.record.rounds if r.samples}


def _disturbed(before: Row, after: Row) -> bool:
    held_up = any(row.cpu_share is not None and row.cpu_share < LEAST_CPU_SHARE for row in (before, after))
    drift = math.log(after.cpu_ratio / before.cpu_ratio) if after.cpu_ratio and before.cpu_ratio else 0.0
    return held_up or abs(drift) > math.log(CPU_DRIFT)
