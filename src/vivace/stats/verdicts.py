"""Faster, slower, same, or not known: what an interval of a speed-up allows to say."""

from __future__ import annotations

from enum import StrEnum

from vivace.stats.intervals import Interval

SAME_WITHIN = 0.01


class Verdict(StrEnum):
    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    UNCLEAR = "unclear"


def verdict(ratio: Interval) -> Verdict:
    """`same`: the whole interval within 1 % of 1; `faster`, `slower`: it lies on one side of 1; else `unclear`."""
    if ratio.low is None or ratio.high is None:
        return Verdict.UNCLEAR
    if ratio.low >= 1 - SAME_WITHIN and ratio.high <= 1 + SAME_WITHIN:
        return Verdict.SAME
    if ratio.low > 1:
        return Verdict.FASTER
    if ratio.high < 1:
        return Verdict.SLOWER
    return Verdict.UNCLEAR
