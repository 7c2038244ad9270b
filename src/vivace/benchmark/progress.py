"""Receivers of events while trials run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vivace.foundation.spec.record import Round
from vivace.foundation.spec.timing import Timing
from vivace.foundation.spec.trial import Trial


class Progress:
    """Receives events while trials run, for a terminal or a log; this one shows nothing.

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

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"  # in signatures


SILENT = Progress()


@dataclass
class Forwarding(Progress):
    """A Progress that passes on to another one every event that a subclass does not receive itself."""

    progress: Progress

    def __post_init__(self) -> None:
        for name in [name for name in vars(Progress) if not name.startswith("_")]:
            if getattr(type(self), name) is getattr(Progress, name):
                setattr(self, name, getattr(self.progress, name))


_LEAST_S = 2.0


@dataclass
class Deadline:
    """Decides which rounds still fit, from estimates that each finished round corrects.

    A round that is under way at the deadline is stopped, and nothing of it is stored. The first rounds of the baseline
    and of the first recipe are always tried; all other rounds begin only if there is time. Trials are in the order of
    their rank, so the last ones are left out first.

    Attributes:
        rounds_until, at: of the clock: when rounds end, and when the quality pass does, which follows them.
        first_s, later_s: about how long a round of each trial takes, the baseline's first: with its images, and
            without, which the first round has drawn.
    """

    rounds_until: float
    at: float
    first_s: Sequence[float]
    later_s: Sequence[float]
    clock: Callable[[], float] = time.monotonic
    _expected_s: float = 0.0
    _took_s: float = 0.0
    _measured: dict[int, list[int]] = field(default_factory=dict)
    _began: float = 0.0

    @property
    def left_s(self) -> float:
        return self.at - self.clock()

    @property
    def left_for_rounds_s(self) -> float:
        return self.rounds_until - self.clock()

    @property
    def slowness(self) -> float:
        """Ratio of measured to estimated times of rounds; 1 before the first."""
        return self._took_s / self._expected_s if self._expected_s else 1.0

    def allows(self, trial: int, index: int, due: Sequence[int]) -> bool:
        """Whether a round still fits; `due` are the trials whose round of this index has not run yet, this one
        included."""
        left = self.left_for_rounds_s
        if left <= 0:
            return False
        done = self._measured.get(index, [])
        is_first = not any(of for other, of in self._measured.items() if other != index)
        if is_first and trial <= 1:
            return True
        if trial == 0 and (done or len(due) == 1):
            return bool(done)  # where nothing else was measured there is nothing to compare
        before = {other for other in due if other <= max(trial, 1)}
        return self.slowness * sum(self._estimate(other) for other in before) < left

    def has_time_for(self, trials: Sequence[int]) -> bool:
        return self.slowness * sum(map(self._estimate, trials)) < self.left_for_rounds_s

    def begin(self) -> None:
        self._began = self.clock()

    def end(self, trial: int, index: int) -> None:
        self._took_s += self.clock() - self._began
        self._expected_s += self._estimate(trial)
        self._measured.setdefault(index, []).append(trial)

    def _estimate(self, trial: int) -> float:
        has_run = any(trial in of for of in self._measured.values())
        return (self.later_s if has_run else self.first_s)[trial]


def is_over(deadline: Deadline | None) -> bool:
    return deadline is not None and deadline.left_s <= 0


def limit_s(usual_s: float, deadline: Deadline | None) -> float:
    """Return the time limit of a request after the rounds: the usual one, or what is left."""
    return usual_s if deadline is None else max(_LEAST_S, min(usual_s, deadline.left_s))
