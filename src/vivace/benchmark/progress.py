"""Receivers of events while trials run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vivace.foundation.spec.record import Round
from vivace.foundation.spec.timing import Timing
from vivace.foundation.spec.trial import Trial


class Progress(Protocol):
    """Receives events while trials run, for a terminal or a log.

    `index` is that of the trial; the baseline is 0. `todo` lists the rounds that will run, as (trial, index). `quality`
    says what the quality pass does, and how many of its images are done. An `event` is what a worker tells of a round,
    or with the key "lost" the name of a place that ended, with "why" the reason, and with "again" how many finished
    rounds of each trial are measured once more elsewhere, by the trial's index.
    """

    def begin(self, trials: list[Trial], timing: Timing, todo: Sequence[tuple[int, int]]) -> None: ...
    def start_round(self, index: int, round_index: int) -> None: ...
    def event(self, event: dict[str, Any]) -> None: ...
    def end_round(self, index: int, round_: Round) -> None: ...
    def end(self) -> None: ...
    def quality(self, what: str, done: int, total: int) -> None: ...
    def end_quality(self, num_scored: int, num_drawn: int, seconds: float) -> None: ...


class Silent:
    """A Progress that shows nothing."""

    def begin(self, trials: list[Trial], timing: Timing, todo: Sequence[tuple[int, int]]) -> None: ...
    def start_round(self, index: int, round_index: int) -> None: ...
    def event(self, event: dict[str, Any]) -> None: ...
    def end_round(self, index: int, round_: Round) -> None: ...
    def end(self) -> None: ...
    def quality(self, what: str, done: int, total: int) -> None: ...
    def end_quality(self, num_scored: int, num_drawn: int, seconds: float) -> None: ...


SILENT = Silent()


@dataclass
class Forwarding:
    """A Progress that passes every event on to another."""

    progress: Progress

    def begin(self, trials: list[Trial], timing: Timing, todo: Sequence[tuple[int, int]]) -> None:
        self.progress.begin(trials, timing, todo)

    def start_round(self, index: int, round_index: int) -> None:
        self.progress.start_round(index, round_index)

    def event(self, event: dict[str, Any]) -> None:
        self.progress.event(event)

    def end_round(self, index: int, round_: Round) -> None:
        self.progress.end_round(index, round_)

    def end(self) -> None:
        self.progress.end()

    def quality(self, what: str, done: int, total: int) -> None:
        self.progress.quality(what, done, total)

    def end_quality(self, num_scored: int, num_drawn: int, seconds: float) -> None:
        self.progress.end_quality(num_scored, num_drawn, seconds)


@dataclass
class CountingRounds(Forwarding):
    """A Progress that counts the rounds that end."""

    num_rounds: int = field(default=0, init=False)

    def end_round(self, index: int, round_: Round) -> None:
        self.num_rounds += 1
        super().end_round(index, round_)
