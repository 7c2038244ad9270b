"""Find the fastest recipe within limits by measuring little: `vivace.tune` and `vivace tune`."""

from vivace.tuning.wanted import Goal, Wanted

__all__ = ["Goal", "Wanted"]
