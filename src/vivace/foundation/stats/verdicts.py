"""Verdicts on a speed-up: faster, slower, same or unclear."""

from __future__ import annotations

import math
from enum import StrEnum

from vivace.foundation.stats.intervals import DEFAULT_SPREAD, Interval, LogMean, Spread, student_t

SAME_WITHIN = 0.01
SURE = 0.99
"""Confidence of a verdict: with 95 %, two in a hundred comparisons of a recipe with itself lie on one side."""
ONE_ROUND_MARGIN = 0.10
"""A single round cannot tell a slower machine from a slower recipe: on a shared two-core server a recipe's speed-up was
0.92, 1.02 and 1.09 in three runs."""
POWER = 0.8
"""Power: a difference counts as detectable if four in five comparisons detect it."""
MOST_ROUNDS = 100


class Gate(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    UNCLEAR = "unclear"


class Verdict(StrEnum):
    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    UNCLEAR = "unclear"


def verdict(ratio: LogMean, num_rounds: int) -> Verdict:
    """Return the verdict on a speed-up's logarithm.

    `faster` and `slower`: the 99 % interval lies beyond 1 % from 1, that of a single round beyond ONE_ROUND_MARGIN.
    `same`: the 95 % interval of several rounds lies within 1 % of 1. Otherwise `unclear`.
    """
    sure, usual = ratio.interval(SURE), ratio.interval()
    if sure.low is None or sure.high is None or usual.low is None or usual.high is None:
        return Verdict.UNCLEAR
    margin = ONE_ROUND_MARGIN if num_rounds < 2 else SAME_WITHIN
    if sure.low > 1 + margin:
        return Verdict.FASTER
    if sure.high < 1 - margin:
        return Verdict.SLOWER
    if num_rounds >= 2 and usual.low >= 1 - SAME_WITHIN and usual.high <= 1 + SAME_WITHIN:
        return Verdict.SAME
    return Verdict.UNCLEAR


def detectable(rounds: int, spread: Spread = DEFAULT_SPREAD) -> float:
    """Return the least gain that four in five comparisons call faster: 0.12 is 12 %.

    Args:
        spread: how much processes are expected to differ. Their calls are taken to be enough for this to decide.
    """
    if rounds < 2:
        return ONE_ROUND_MARGIN
    error, dof = _error(rounds, spread)
    reach = (student_t(0.5 + SURE / 2, dof) + student_t(POWER, dof)) * error
    return math.exp(math.log1p(SAME_WITHIN) + reach) - 1


def rounds_for_same(margin: float = SAME_WITHIN, spread: Spread = DEFAULT_SPREAD) -> int | None:
    """Return the number of rounds after which four in five comparisons call equal recipes the same.

    None: not even after MOST_ROUNDS.

    Args:
        margin: within which they must surely lie: 0.01 is 1 %.
    """
    for rounds in range(2, MOST_ROUNDS + 1):
        error, dof = _error(rounds, spread)
        # Both ends have to lie within the margin, so each may miss it in one of ten.
        if (student_t(0.975, dof) + student_t((1 + POWER) / 2, dof)) * error <= math.log1p(margin):
            return rounds
    return None


def _error(rounds: int, spread: Spread) -> tuple[float, float]:
    """Return the standard error of a speed-up's logarithm, and its degrees of freedom."""
    difference = LogMean(0.0, math.sqrt(2) * spread.sd / math.sqrt(rounds), spread.dof + rounds - 1)
    assert difference.error is not None
    return difference.error, difference.dof


def gate(value: Interval, minimum: float) -> Gate:
    """Return `failed` if the whole interval lies below the minimum, `passed` if none of it does, else `unclear`.

    Without an interval (fewer than three images) the result is `unclear`.
    """
    if value.low is None or value.high is None:
        return Gate.UNCLEAR
    if value.high < minimum:
        return Gate.FAILED
    return Gate.PASSED if value.low >= minimum else Gate.UNCLEAR
