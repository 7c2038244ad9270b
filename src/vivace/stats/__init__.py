"""Statistics on plain numbers: intervals, ratios, verdicts, the stopping rule. Needs only numpy."""

from vivace.stats.gate import Gate, gate
from vivace.stats.intervals import Interval, median_interval
from vivace.stats.paired import mean_interval
from vivace.stats.ratios import speedup
from vivace.stats.stopping import enough_samples, is_steady
from vivace.stats.verdicts import ONE_ROUND_MARGIN, Verdict, verdict

__all__ = [
    "ONE_ROUND_MARGIN",
    "Gate",
    "Interval",
    "Verdict",
    "enough_samples",
    "gate",
    "is_steady",
    "mean_interval",
    "median_interval",
    "speedup",
    "verdict",
]
