"""The quality gate: decides whether a figure reaches its minimum."""

from __future__ import annotations

from enum import StrEnum

from vivace.foundation.stats.intervals import Interval


class Gate(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    UNCLEAR = "unclear"


def gate(value: Interval, minimum: float) -> Gate:
    """Return `failed` if the whole interval lies below the minimum, `passed` if none of it does, else `unclear`.

    Without an interval (fewer than three images) the result is `unclear`.
    """
    if value.low is None or value.high is None:
        return Gate.UNCLEAR
    if value.high < minimum:
        return Gate.FAILED
    return Gate.PASSED if value.low >= minimum else Gate.UNCLEAR
