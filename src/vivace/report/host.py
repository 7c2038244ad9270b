"""Whether other programs or a change of the machine's speed disturbed a measurement, and times as if it had kept it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise

from vivace.foundation.spec.record import Outcome, Record
from vivace.foundation.stats import Interval, Levels, LogMean, Verdict, level_at, verdict

LEAST_CPU_SHARE = 0.9
"""Share of its threads' time below which a process was held up by other programs."""
CPU_DRIFT = 1.25
"""A Python loop's time varies by a tenth on a quiet machine."""
MOST_WAITING = 0.3
"""Share of its time for which a GPU may wait for a CPU whose speed changed. Launches do not scale exactly as a Python
loop does: where the GPU waited for half the time, bf16 seemed 1.67 times as fast as fp16, corrected 1.29 times
(SDXL-Lightning, results/study-003.json)."""


def cpu_share(record: Record) -> float | None:
    """Return the least share of its threads' time that the trial's process got in a round; None on a GPU.

    One thread that computes gets all of its time on an idle machine. Several threads share the work unevenly, so the
    round in which they got most counts.
    """
    if record.environment.device != "cpu":
        return None
    rounds = [
        sum(s.cpu_s for s in r.samples) / sum(s.total_s for s in r.samples)
        for r in record.rounds
        if r.samples
    ]
    if record.environment.num_threads == 1:
        return min(rounds, default=None)
    return min(rounds) / max(rounds) if len(rounds) > 1 and max(rounds) > 0 else None


def cpu_ratio(record: Record, baseline: Record) -> float | None:
    """Return the time of a fixed Python loop beside the record over that beside the baseline; None if unknown."""
    here, there = _python_ms(record), _python_ms(baseline)
    return here / there if here and there else None


def _python_ms(record: Record) -> float | None:
    """Return the median over all rounds, measured before and after the timed calls."""
    times_ms = [r.conditions.get(name) for r in record.rounds for name in ("python_ms", "python_after_ms")]
    return (
        statistics.median(numbers) if (numbers := [ms for ms in times_ms if isinstance(ms, float)]) else None
    )


def has_changed(ratio: float | None) -> bool:
    """Whether a ratio of Python times is more than noise."""
    return ratio is not None and abs(math.log(ratio)) > math.log(CPU_DRIFT)


def stretch_of(total_s: float, busy_s: float | None, ratio: float | None) -> float | None:
    """Return the factor by which a speed-up would change if the CPU were as fast as during the baseline.

    Only the time in which the GPU waits depends on the CPU.

    Args:
        busy_s: seconds of `total_s` in which the GPU is busy; None if unknown.
        ratio: of Python times, see `cpu_ratio`.

    Returns:
        1 if the CPU's speed did not change; None if it did and the GPU waits for more than MOST_WAITING of the time, or
        for an unknown time.
    """
    if ratio is None or not has_changed(ratio):
        return 1.0
    if busy_s is None:
        return None
    waiting_s = max(0.0, total_s - busy_s)
    if waiting_s > MOST_WAITING * total_s:
        return None
    return total_s / (total_s - waiting_s + waiting_s / ratio)


def most_stretch(ratio: float) -> float:
    """Return a generous bound where `stretch_of` is unknown: the square of the CPU's change, over the whole call.

    Launches do not change exactly as the Python loop does (see MOST_WAITING), and part of a call does not wait at all.
    """
    return ratio**2


def allowing_for(stretch: float, gain: LogMean, num_rounds: int) -> tuple[Interval, Verdict]:
    """Return a speed-up's interval, widened by the possible effect of the CPU's speed, and a matching verdict."""
    interval, own = gain.interval(), verdict(gain, num_rounds)
    if stretch == 1.0:
        return interval, own
    corrected = verdict(LogMean(gain.mean + math.log(stretch), gain.error, gain.dof), num_rounds)
    if interval.low is not None and interval.high is not None:
        interval = Interval(
            interval.point, interval.low * min(1.0, stretch), interval.high * max(1.0, stretch)
        )
    return interval, own if own is corrected else Verdict.UNCLEAR


SecondsByRound = dict[int, tuple[float, ...]]
"""Seconds per image of a recipe's timed calls, by the index of the round."""


def levels_of(records: Sequence[Record]) -> dict[int, Levels]:
    """Return the levels of each round in which a recipe has canaries: its own, which is 0, and the canaries'."""
    levels = {}
    for record in records:
        for round_ in record.rounds:
            if round_.samples and round_.canaries:
                own = _level([s.total_s for s in round_.samples])
                points = [(_time(c.started_at), _level(c.samples_s) - own) for c in round_.canaries]
                levels[round_.index] = sorted([(_time(round_.started_at), 0.0), *points])
    return levels


def moves_of(records: Sequence[Record]) -> list[float]:
    """Return the changes of the logarithm of a recipe's time from one measurement of a round to the next."""
    points = levels_of(records).values()
    return [later - earlier for of in points for (_, earlier), (_, later) in pairwise(of)]


def steady_seconds(records: Sequence[Record]) -> list[SecondsByRound]:
    """Return each record's seconds, as if the machine had kept its speed through each round.

    Between two measurements of a round's first recipe the speed is interpolated; without canaries nothing changes. A
    record of which a round failed has none.
    """
    levels = levels_of(records)
    return [
        {
            r.index: tuple(
                s.total_s
                / record.trial.workload.batch
                / math.exp(level_at(levels[r.index], _time(r.started_at)))
                if r.index in levels
                else s.total_s / record.trial.workload.batch
                for s in r.samples
            )
            for r in record.rounds
            if r.samples
        }
        if record.outcome is Outcome.MEASURED
        else {}
        for record in records
    ]


def _level(seconds: Sequence[float]) -> float:
    return math.log(statistics.median(seconds))


def _time(started_at: str) -> float:
    started = datetime.fromisoformat(started_at)
    return (started if started.tzinfo else started.replace(tzinfo=UTC)).timestamp()
