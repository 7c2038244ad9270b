"""Times of recipes as if the machine had kept its speed through each round, from a recipe measured again in it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise

from vivace.foundation.spec.record import Outcome, Record
from vivace.foundation.stats import Levels, level_at

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
