"""When the warm-up is over, and when there are enough samples."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from vivace.foundation.stats.intervals import log_error

WINDOW = 2
STEADY_WITHIN = 0.01
TARGET_HALF_WIDTH = 0.01
SHORT_CALL_S = 1.0
_Z = NormalDist().inv_cdf(0.975)


def is_steady(times_s: Sequence[float]) -> bool | None:
    """Whether the last two calls took as long as the two before; None if there were fewer than four.

    As long: their means differ by less than 1 %, or by less than the calls of one pair do.
    """
    if len(times_s) < 2 * WINDOW:
        return None
    before, now = times_s[-4:-2], times_s[-2:]
    apart = max(abs(first - second) / 2 for first, second in (before, now))
    earlier, later = sum(before) / WINDOW, sum(now) / WINDOW
    return abs(later - earlier) <= max(STEADY_WITHIN * earlier, apart)


def enough_samples(times_s: Sequence[float]) -> bool:
    """Whether the 95 % interval of the median is within 1 % of it, after at least 6 samples (10 of short calls)."""
    if len(times_s) < 6 or (len(times_s) < 10 and float(np.median(times_s)) < SHORT_CALL_S):
        return False
    return _Z * log_error(times_s) <= TARGET_HALF_WIDTH
