"""Timing settings: how long and how often to measure."""

from __future__ import annotations

from pydantic import Field

from vivace.spec.base import Spec


class Timing(Spec):
    """How long and how often to measure. Not part of a row's key: it changes the precision, not the trial.

    Attributes:
        rounds: rounds per trial, each in a separate process.
        repeats: timed calls per round; None: until the interval of the median is narrow enough.
        max_seconds: limit on the timed calls of a round if `repeats` is None, and on the warm-up after the first call.
        max_warmup: maximum calls before timing; the warm-up ends earlier when the times are steady.
        timeout_s: seconds for a whole round, loading included; then its process is killed.
        threads: CPU threads; None for the model's own number.
    """

    rounds: int = Field(default=2, ge=1, le=100)
    repeats: int | None = Field(default=None, ge=1, le=10_000)
    max_seconds: float = Field(default=20.0, gt=0, le=1_000_000)
    max_warmup: int = Field(default=8, ge=1, le=1000)
    timeout_s: float = Field(default=600.0, gt=0, le=1_000_000)
    threads: int | None = Field(default=None, ge=1, le=1024)
