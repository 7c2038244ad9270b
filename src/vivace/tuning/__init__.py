"""Find the fastest recipe within limits by measuring little: `vivace.tune` and `vivace tune`."""

from vivace.tuning.answer import Tuned
from vivace.tuning.search.objective import Goal, Objective
from vivace.tuning.settings import ImageRequest
from vivace.tuning.tuner import tune

__all__ = ["Goal", "ImageRequest", "Objective", "Tuned", "tune"]
