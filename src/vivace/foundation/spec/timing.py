"""Timing settings: how long and how often to measure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vivace.foundation.spec.settings import Option, Settings, Threads, Timeout, one_of_many, read_by


def _repeats(text: str) -> int | None:
    number = one_of_many(text, 1, 10_000, "auto")
    return number if isinstance(number, int) else None


Rounds = Annotated[
    int,
    Field(ge=1, le=100, strict=True),
    Option("Rounds per recipe, each in its own process; recipes are interleaved."),
]
Repeats = Annotated[
    int | None,
    Field(ge=1, le=10_000),
    read_by(_repeats),
    Option(
        "Timed calls per round; auto: as many as a narrow interval needs.", metavar="auto|N", default="auto"
    ),
]
MaxWarmup = Annotated[
    int,
    Field(ge=1, le=1000, strict=True),
    Option("Maximum number of warm-up calls before timing; they stop once the times are steady.", "--warmup"),
]


class Timing(Settings):
    """How long and how often to measure. Not part of a row's key: it changes the precision, not the trial.

    `repeats` None is `auto`. `max_seconds` limits a round's timed calls without `repeats`, and the warm-up after the
    first call. `timeout_s` includes loading; then the round's process is killed. `threads` None is the model's own
    number.
    """

    rounds: Rounds = 2
    repeats: Repeats = None
    max_seconds: float = Field(default=20.0, gt=0, le=1_000_000)
    max_warmup: MaxWarmup = 8
    timeout_s: Timeout = 600.0
    threads: Threads = None
