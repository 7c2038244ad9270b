"""Faster, slower, same, or not known: what an interval of a speed-up allows to say."""

from __future__ import annotations

from enum import StrEnum

from vivace.stats.intervals import Interval

SAME_WITHIN = 0.01
# One round cannot see that the machine was slower during one process than during another: on a shared two-core server
# a recipe's speed-up came out as 0.92, 1.02 and 1.09 in three runs. With two rounds and more, the bootstrap over rounds
# sees it.
ONE_ROUND_MARGIN = 0.10


class Verdict(StrEnum):
    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    UNCLEAR = "unclear"


def verdict(ratio: Interval, num_rounds: int) -> Verdict:
    """What the interval of a speed-up allows to say.

    `same`: all of it within 1 % of 1; `faster`, `slower`: all of it on one side of 1; else `unclear`. A comparison
    within one round must clear 1 by ONE_ROUND_MARGIN, and never is `same`.
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
