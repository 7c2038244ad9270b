"""Verdicts on a speed-up: faster, slower, same or unclear."""

from __future__ import annotations

from enum import StrEnum

from vivace.stats.intervals import Interval

SAME_WITHIN = 0.01
# A single round cannot detect that the machine was slower during one process than during another: on a shared two-core
# server a recipe's speed-up was 0.92, 1.02 and 1.09 in three runs. From two rounds on, the bootstrap over rounds
# detects it.
ONE_ROUND_MARGIN = 0.10


class Verdict(StrEnum):
    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    UNCLEAR = "unclear"


def verdict(ratio: Interval, num_rounds: int) -> Verdict:
    """Return the verdict that the interval of a speed-up supports.

    `same`: the whole interval is within 1 % of 1. `faster`, `slower`: it lies on one side of 1. Otherwise `unclear`. A
    single round must clear 1 by ONE_ROUND_MARGIN, and is never `same`.
    """
    if ratio.low is None or ratio.high is None:
        return Verdict.UNCLEAR
    margin = ONE_ROUND_MARGIN if num_rounds < 2 else 0.0
    if num_rounds >= 2 and ratio.low >= 1 - SAME_WITHIN and ratio.high <= 1 + SAME_WITHIN:
        return Verdict.SAME
    if ratio.low > 1 + margin:
        return Verdict.FASTER
    if ratio.high < 1 - margin:
        return Verdict.SLOWER
    return Verdict.UNCLEAR
