"""Verdicts on a speed-up: faster, slower, same or unclear."""

from __future__ import annotations

from enum import StrEnum

from vivace.foundation.stats.intervals import LogMean

SAME_WITHIN = 0.01
SURE = 0.99
"""Confidence of a verdict: with 95 %, two in a hundred comparisons of a recipe with itself lie on one side."""
ONE_ROUND_MARGIN = 0.10
"""A single round cannot tell a slower machine from a slower recipe: on a shared two-core server a recipe's speed-up was
0.92, 1.02 and 1.09 in three runs."""


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
