"""Statistics on plain numbers: intervals, ratios, verdicts, the stopping rule. Needs only numpy."""

from vivace.stats.block_bootstrap import block_interval, block_length, block_ratio
from vivace.stats.equivalence import Equivalence, EquivalenceTest, equivalence
from vivace.stats.gate import Gate, gate
from vivace.stats.intervals import DEFAULT_SPREAD, Interval, LogMean, Spread, median_interval
from vivace.stats.movement import Levels, level_at
from vivace.stats.paired import MIN_GROUPS, mean_interval
from vivace.stats.planning import detectable, rounds_for_same
from vivace.stats.ratios import log_speedup, speedup
from vivace.stats.spread import learn_spread
from vivace.stats.stopping import enough_samples, is_steady
from vivace.stats.verdicts import ONE_ROUND_MARGIN, Verdict, verdict

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
    "block_interval",
    "block_length",
    "block_ratio",
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
