"""Statistics on plain numbers: intervals, ratios, verdicts, the stopping rule. Needs only numpy."""

from vivace.foundation.stats.equivalence import (
    MIN_GROUPS,
    Equivalence,
    EquivalenceTest,
    equivalence,
    mean_interval,
)
from vivace.foundation.stats.intervals import DEFAULT_SPREAD, Interval, LogMean, Spread, median_interval
from vivace.foundation.stats.sequential import Levels, learn_spread, level_at, log_speedup, speedup
from vivace.foundation.stats.until import enough_samples, is_steady
from vivace.foundation.stats.verdicts import (
    ONE_ROUND_MARGIN,
    Gate,
    Verdict,
    detectable,
    gate,
    rounds_for_same,
    verdict,
)

__all__ = [
    "DEFAULT_SPREAD",
    "MIN_GROUPS",
    "ONE_ROUND_MARGIN",
    "Equivalence",
    "EquivalenceTest",
    "Gate",
    "Interval",
    "Levels",
    "LogMean",
    "Spread",
    "Verdict",
    "detectable",
    "enough_samples",
    "equivalence",
    "gate",
    "is_steady",
    "learn_spread",
    "level_at",
    "log_speedup",
    "mean_interval",
    "median_interval",
    "rounds_for_same",
    "speedup",
    "verdict",
]
