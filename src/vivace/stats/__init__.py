"""Pure statistics on numbers: intervals, ratios, verdicts, the stopping rule. numpy only."""

from vivace.stats.intervals import Interval, median_interval
from vivace.stats.ratios import speedup
from vivace.stats.stopping import enough_samples, is_steady
from vivace.stats.verdicts import Verdict, verdict

__all__ = ["Interval", "Verdict", "enough_samples", "is_steady", "median_interval", "speedup", "verdict"]
