"""How long and how often to measure. Not part of a row's key: it changes the precision, not the trial."""

from __future__ import annotations

from pydantic import Field

from vivace.spec.base import Spec


class Timing(Spec):
    """Rounds are processes; within a round calls are repeated.

    Attributes:
        rounds: processes a trial.
        repeats: timed calls a round; None: until the interval of the median is narrow enough.
        max_seconds: cap on the timed calls of a round when `repeats` is None, and on the warm-up after the first call.
        max_warmup: calls before timing, at most; the warm-up ends earlier when the times are steady.
        timeout_s: for one round, everything included; then its process is killed.
        threads: CPU threads; None: the model's own number.
    """

    rounds: int = Field(default=2, ge=1, le=100)
    repeats: int | None = Field(default=None, ge=1, le=10_000)
    max_seconds: float = Field(default=20.0, gt=0)
    max_warmup: int = Field(default=8, ge=1)
    timeout_s: float = Field(default=600.0, gt=0)
    threads: int | None = Field(default=None, ge=1, le=1024)
