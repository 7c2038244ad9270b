"""The stopping rule of `vivace bench --until`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from vivace.errors import UsageError
from vivace.foundation.stats.intervals import LogMean, log_error
from vivace.foundation.stats.verdicts import SAME_WITHIN, SURE, Verdict

FALSE_SAME = 0.05
"""Error rate over all looks: recipes that differ by the margin are called the same."""
MOST_ROUNDS = 32
_SAME = re.compile(r"same(?:\s+(?P<percent>\d+(?:\.\d+)?)\s*%)?")
WINDOW = 2
STEADY_WITHIN = 0.01
TARGET_HALF_WIDTH = 0.01
SHORT_CALL_S = 1.0
_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Until:
    """The answers that end a comparison: "faster", "slower", and "same" within a share.

    Attributes:
        differences: which of faster and slower end it.
        same_within: how near counts as the same, 0.03 for 3 %; None if sameness does not end it.
    """

    differences: frozenset[Verdict]
    same_within: float | None

    @classmethod
    def parse(cls, text: str) -> Until:
        """Parse e.g. "same 3%", "faster" or "faster|slower|same 3%".

        Raises:
            UsageError: it is something else.
        """
        differences: set[Verdict] = set()
        same_within = None
        for part in (part.strip().lower() for part in text.split("|")):
            if part in (Verdict.FASTER, Verdict.SLOWER):
                differences.add(Verdict(part))
                continue
            read = _SAME.fullmatch(part)
            percent = None if read is None else read["percent"]
            share = SAME_WITHIN if percent is None else float(percent) / 100
            if read is None or not 0.001 <= share <= 0.5:
                raise UsageError(
                    f"{part!r} is not an answer; give faster, slower or same N% (0.1 to 50), "
                    "or several with | between them, e.g. 'faster|same 3%'"
                )
            same_within = share
        return cls(frozenset(differences), same_within)

    def answer(self, ratio: LogMean, num_rounds: int, num_looks: int) -> Verdict | None:
        """Return the answer that ends the comparison; None if there is none yet.

        Who looks again and again is wrong more often, so the allowed errors are divided among the looks.
        """
        if num_rounds < 2 or ratio.error is None:
            return None
        sure, usual = ratio.interval(1 - (1 - SURE) / num_looks), ratio.interval(1 - FALSE_SAME / num_looks)
        assert sure.low is not None
        assert sure.high is not None
        assert usual.low is not None
        assert usual.high is not None
        if Verdict.FASTER in self.differences and sure.low > 1 + SAME_WITHIN:
            return Verdict.FASTER
        if Verdict.SLOWER in self.differences and sure.high < 1 - SAME_WITHIN:
            return Verdict.SLOWER
        if self.same_within is not None:
            reach = math.log1p(self.same_within)
            if -reach <= math.log(usual.low) and math.log(usual.high) <= reach:
                return Verdict.SAME
        return None

    def is_missed(self, ratio: LogMean, num_looks: int) -> bool:
        """Whether the opposite is certain, so that more rounds would not lead to an answer."""
        sure = ratio.interval(1 - (1 - SURE) / num_looks)
        if sure.low is None or sure.high is None:
            return False
        reach = 1 + (self.same_within or 0.0)
        above, below = sure.low > max(reach, 1 + SAME_WITHIN), sure.high < min(1 / reach, 1 - SAME_WITHIN)
        return (above and Verdict.FASTER not in self.differences) or (
            below and Verdict.SLOWER not in self.differences
        )


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
