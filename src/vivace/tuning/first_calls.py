"""Look at the first images of a search's baseline, so that a limit that cannot be kept is refused at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vivace.benchmark.runner import Progress
from vivace.spec.record import Round
from vivace.spec.timing import Timing
from vivace.spec.trial import Trial

_SHARE_OF_FIRST = 0.5
"""Of a first call that a later one takes at least; the first also loads kernels and chooses algorithms."""


@dataclass
class FirstCalls:
    """A `Progress` that passes everything on, and checks as calls end.

    Attributes:
        progress: receives everything.
        check: takes the least seconds of later calls, and their likely seconds. What it raises ends the round.
    """

    progress: Progress
    check: Callable[[float, float], None]
    _started: float = 0.0

    def begin(self, trials: list[Trial], timing: Timing, todo: Sequence[tuple[int, int]]) -> None:
        self.progress.begin(trials, timing, todo)

    def start_round(self, index: int, round_index: int) -> None:
        self.progress.start_round(index, round_index)

    def event(self, event: dict[str, Any]) -> None:
        self.progress.event(event)
        now = time.monotonic()
        if event.get("event") == "phase" and event.get("phase") == "warm-up":
            share = _SHARE_OF_FIRST if event["done"] == 1 else 1.0
            call_s = now - self._started
            self.check(share * call_s, call_s)
        self._started = now

    def end_round(self, index: int, round_: Round) -> None:
        self.progress.end_round(index, round_)

    def end(self) -> None:
        self.progress.end()

    def quality(self, what: str, done: int, total: int) -> None:
        self.progress.quality(what, done, total)

    def end_quality(self, num_scored: int, num_drawn: int, seconds: float) -> None:
        self.progress.end_quality(num_scored, num_drawn, seconds)
