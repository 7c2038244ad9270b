"""Learn from a quality pass how long the next one takes."""

from __future__ import annotations

from dataclasses import dataclass

from vivace.benchmark.progress import Forwarding
from vivace.tuning.search.pace import Pace


@dataclass
class TimedQualityPasses(Forwarding):
    """A `Progress` that passes everything on, and notes the time of quality passes."""

    pace: Pace

    def end_quality(self, num_scored: int, num_drawn: int, seconds: float) -> None:
        self.pace.note_quality(num_scored, num_drawn, seconds)
        super().end_quality(num_scored, num_drawn, seconds)
