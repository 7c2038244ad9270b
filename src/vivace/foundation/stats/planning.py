"""The power of a comparison, before it is run."""

from __future__ import annotations

import math

from vivace.foundation.stats.intervals import DEFAULT_SPREAD, LogMean, Spread, student_t
from vivace.foundation.stats.verdicts import ONE_ROUND_MARGIN, SAME_WITHIN, SURE

POWER = 0.8
"""Power: a difference counts as detectable if four in five comparisons detect it."""
MOST_ROUNDS = 100


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
