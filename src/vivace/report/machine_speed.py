"""Speed of the machine while each recipe was measured, from the baseline's own calls through a round."""

from __future__ import annotations

import math
import statistics
from datetime import UTC, datetime
from itertools import pairwise

from vivace.foundation.spec.record import Record, Round
from vivace.foundation.stats import Levels, level_at


def levels_of(baseline: Record) -> dict[int, Levels]:
    """Return the levels of each of the baseline's rounds that have canaries: its own, and those of the canaries."""
    levels = {}
    for round_ in baseline.rounds:
        if round_.samples and round_.canaries:
            points = [(_time(round_.started_at), _level([s.total_s for s in round_.samples]))]
            points += [(_time(canary.started_at), _level(canary.samples_s)) for canary in round_.canaries]
            levels[round_.index] = sorted(points)
    return levels


def moves_of(levels: dict[int, Levels]) -> list[float]:
    """Return the changes of the logarithm of the baseline's time from one measurement of a round to the next."""
    return [later - earlier for points in levels.values() for (_, earlier), (_, later) in pairwise(points)]


def baseline_beside(
    samples: dict[int, tuple[float, ...]], rounds: tuple[Round, ...], baseline: Record
) -> dict[int, tuple[float, ...]]:
    """Return the baseline's samples by round, corrected to the time of a recipe's rounds.

    Between two of the baseline's measurements its time is interpolated; without canaries nothing changes.

    Args:
        samples: the baseline's, by round.
        rounds: of the recipe.
    """
    levels, corrected = levels_of(baseline), dict(samples)
    own = {r.index: r.samples for r in baseline.rounds if r.samples}
    for round_ in rounds:
        points = levels.get(round_.index, [])
        if len(points) > 1 and round_.index in samples:
            measured = _level([s.total_s for s in own[round_.index]])
            factor = math.exp(level_at(points, _time(round_.started_at)) - measured)
            corrected[round_.index] = tuple(x * factor for x in samples[round_.index])
    return corrected


def _level(seconds: list[float] | tuple[float, ...]) -> float:
    return math.log(statistics.median(seconds))


def _time(started_at: str) -> float:
    started = datetime.fromisoformat(started_at)
    return (started if started.tzinfo else started.replace(tzinfo=UTC)).timestamp()
