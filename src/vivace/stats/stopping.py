"""When the warm-up is over, and when there are enough samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vivace.stats.intervals import median_interval

WINDOW = 3
STEADY_WITHIN = 0.01
TARGET_HALF_WIDTH = 0.01
SHORT_CALL_S = 1.0


def is_steady(times_s: Sequence[float]) -> bool:
    """Whether the median of the last three calls is within 1 % of the same median one call earlier."""
    if len(times_s) < WINDOW + 1:
        return False
    now = float(np.median(times_s[-WINDOW:]))
    before = float(np.median(times_s[-WINDOW - 1 : -1]))
    return abs(now - before) <= STEADY_WITHIN * before


def enough_samples(times_s: Sequence[float]) -> bool:
    """Whether the 95 % interval of the median is within 1 % of it, after at least 5 samples (10 of short calls)."""
    if len(times_s) < 5 or (len(times_s) < 10 and float(np.median(times_s)) < SHORT_CALL_S):
        return False
    half_width = median_interval([times_s]).half_width
    return half_width is not None and half_width <= TARGET_HALF_WIDTH
