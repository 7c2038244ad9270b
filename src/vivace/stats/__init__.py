"""Statistics on plain numbers: intervals, ratios, verdicts, the stopping rule. Needs only numpy."""

from vivace.stats.gate import Gate, gate
from vivace.stats.intervals import DEFAULT_SPREAD, Interval, LogMean, Spread, median_interval
from vivace.stats.paired import MIN_GROUPS, mean_interval
from vivace.stats.ratios import log_speedup, speedup
from vivace.stats.spread import learn_spread
from vivace.stats.stopping import enough_samples, is_steady
from vivace.stats.verdicts import ONE_ROUND_MARGIN, Verdict, verdict

__all__ = [
    "DEFAULT_SPREAD",
    "MIN_GROUPS",
    "ONE_ROUND_MARGIN",
    "Gate",
    "Interval",
    "LogMean",
    "Spread",
    "Verdict",
    "enough_samples",
    "gate",
    "is_steady",
    "learn_spread",
    "log_speedup",
    "mean_interval",
    "median_interval",
    "speedup",
    "verdict",
]
