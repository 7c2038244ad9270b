"""Timing settings: how long and how often to measure."""

from __future__ import annotations

from pydantic import Field

from vivace.foundation.spec.base import Spec


class Timing(Spec):
    """How long and how often to measure. Not part of a row's key: it changes the precision, not the trial.

    `repeats` None is `auto`. `timeout_s` includes loading; then the round's process is killed. `threads` None is the
    model's own number.
    """

    rounds: int = Field(
        default=2,
        ge=1,
        le=100,
        description="Rounds per recipe, each in its own process; recipes are interleaved.",
    )
    repeats: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Timed calls per round; auto: as many as a narrow interval needs.",
    )
    max_seconds: float = Field(
        default=20.0,
        gt=0,
        le=1_000_000,
        description="Limit of a round's timed calls without `repeats`, and of the warm-up after the first call.",
    )
    max_warmup: int = Field(
        default=8,
        ge=1,
        le=1000,
        description="Maximum number of warm-up calls before timing; they stop once the times are steady.",
    )
    timeout_s: float = Field(
        default=600.0, gt=0, le=1_000_000, description="Time limit of a round, in seconds."
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="CPU threads; the last bits of an image depend on them.",
    )
