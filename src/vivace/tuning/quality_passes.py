"""Learn from a quality pass how long the next one takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vivace.benchmark.runner import Progress
from vivace.spec.record import Round
from vivace.spec.timing import Timing
from vivace.spec.trial import Trial
from vivace.tuning.pace import Pace


@dataclass(frozen=True)
class TimedQualityPasses:
    """A `Progress` that tells another one everything, and notes the time of quality passes."""

    told: Progress
    pace: Pace

    def begin(self, trials: list[Trial], timing: Timing, todo: Sequence[tuple[int, int]]) -> None:
        self.told.begin(trials, timing, todo)

    def start_round(self, index: int, round_index: int) -> None:
        self.told.start_round(index, round_index)

    def event(self, event: dict[str, Any]) -> None:
        self.told.event(event)

    def end_round(self, index: int, round_: Round) -> None:
        self.told.end_round(index, round_)

    def end(self) -> None:
        self.told.end()

    def quality(self, what: str, done: int, total: int) -> None:
        self.told.quality(what, done, total)

    def end_quality(self, num_scored: int, num_drawn: int, seconds: float) -> None:
        self.pace.note_quality(num_scored, num_drawn, seconds)
        self.told.end_quality(num_scored, num_drawn, seconds)
