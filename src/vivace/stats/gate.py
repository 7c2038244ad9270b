"""The quality gate: whether a figure that must not be too low may be called so."""

from __future__ import annotations

from enum import StrEnum

from vivace.stats.intervals import Interval


class Gate(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    UNCLEAR = "unclear"


def gate(value: Interval, minimum: float) -> Gate:
    """`failed` if the whole interval lies below the minimum, `passed` if none of it does, else `unclear`.

    Without an interval (fewer than three pictures) nothing can be told: `unclear`.
    """
    if value.low is None or value.high is None:
        return Gate.UNCLEAR
    if value.high < minimum:
        return Gate.FAILED
    return Gate.PASSED if value.low >= minimum else Gate.UNCLEAR
