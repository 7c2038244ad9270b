"""Find the fastest recipe within limits by measuring little: `vivace.tune` and `vivace tune`."""

from vivace.tuning.answer import Tuned
from vivace.tuning.asked import Asked
from vivace.tuning.tuner import tune
from vivace.tuning.wanted import Goal, Wanted

__all__ = ["Asked", "Goal", "Tuned", "Wanted", "tune"]
