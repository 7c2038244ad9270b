"""The budget of a search: durations of its parts, and their deadlines, so that an answer is proven in time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vivace.benchmark.progress import Deadline
from vivace.foundation.spec.record import Outcome
from vivace.foundation.stats import Gate
from vivace.recipes.recipe import Recipe
from vivace.tuning.final.finals import ImagePlan
from vivace.tuning.search.pace import Pace
from vivace.tuning.search.results import Result, Rung

FINAL_ROUNDS = 2
"""The speed-up of one round has no interval over processes, so it proves nothing."""
MOST_OF_THE_TIME = 0.2
"""Share of the search time for a round before the final, unless it is expected to take longer."""
_USUAL_LOOKS = 3
"""Usual number of looks at a final's images, for which time is reserved."""
_LOOKS_AT_BOLD = 2
"""The same for later finals, when an answer is already proven."""
_LONG_SHARE = 1 / 60  # of a search's time: the baseline's timed calls in a round of the final
_LEAST_TIMEOUT_S = 20.0
_LATE = 2.0
"""Factor of a round's expected time at which it is stopped."""
_ROOM_TO_DECIDE = 1.5  # a search ran out of time on a busy machine
_OF_THE_BASELINE = 0.5  # share of its time for a finalist without results
_GRACE = 0.05
"""Share of a search's time by which the final's quality pass may exceed it."""
_ROOM = 1.25
"""Factor by which a final may take longer than estimated."""
_FIRST_HALF = 0.5
_MOST_OF_THE_SPARE = 0.75
"""Share of the time before the final that one recipe may take: compiling SDXL as a whole takes two minutes and may pay
off."""


class Timed(Protocol):
    """Estimates the times of a final, of a further batch of its images, and of a batch of recipes with its baseline."""

    def seconds_of_batch(self, recipes: Sequence[Recipe]) -> float: ...
    def seconds_of_final(self, finalists: Sequence[Result]) -> float: ...
    def seconds_of_rounds(self, finalists: Sequence[Result]) -> float: ...
    def seconds_of_images(self, finalists: Sequence[Result]) -> float: ...


@dataclass
class Budget:
    """A number of recipes besides the baseline, and a time of which enough is kept for the final. Without a limit of
    time there is no timetable."""

    number: float = math.inf
    minutes: float = math.inf
    timetable: Timed | None = None
    started: float = field(default_factory=time.monotonic)
    clock: Callable[[], float] = time.monotonic
    final_s: float = 0.0

    @property
    def left_s(self) -> float:
        return 60 * self.minutes - (self.clock() - self.started)

    @property
    def spare_s(self) -> float:
        """Seconds until the final must begin, by the finalists of the last query."""
        return self.left_s - self.final_s

    @property
    def most_s(self) -> float:
        """Longest expected time of a recipe before the final, in seconds; infinite without a limit of time."""
        share = max(MOST_OF_THE_TIME * 60 * self.minutes, _MOST_OF_THE_SPARE * self.spare_s)
        return min(share, self.spare_s)

    def affordable(self, recipes: list[Recipe], finalists: Sequence[Result]) -> list[Recipe]:
        """Return the first recipes, as many as can be measured before the final."""
        if self.timetable is None:
            return recipes
        self.is_over(0, finalists)
        chosen: list[Recipe] = []
        for recipe in recipes:
            if self.timetable.seconds_of_batch([*chosen, recipe]) < self.spare_s:
                chosen.append(recipe)
        return chosen

    def is_over(self, num_trials: int, finalists: Sequence[Result]) -> bool:
        """Whether only the final still fits, given the number of recipes that have been measured."""
        if self.timetable is not None:
            self.final_s = _ROOM * self.timetable.seconds_of_final(finalists)
        return num_trials >= self.number or self.spare_s < 0

    def is_time_to_prove(self, finalists: Sequence[Result]) -> bool:
        """Whether the first final has to begin, so that there is an answer in the first half of the time."""
        if self.timetable is None:
            return False
        spent_s = 60 * self.minutes - self.left_s
        return spent_s + _ROOM * self.timetable.seconds_of_final(finalists) > _FIRST_HALF * 60 * self.minutes

    def allows_another_final(self) -> bool:
        """Whether there is time for one round of it."""
        return self.timetable is None or self.left_s > self.timetable.seconds_of_final([]) / 2

    def allows_rounds(self, finalists: Sequence[Result]) -> bool:
        """Whether all rounds of a final fit."""
        return self.timetable is None or self.left_s > _ROOM * self.timetable.seconds_of_rounds(finalists)

    def allows_images(self, undecided: Sequence[Result]) -> bool:
        """Whether another batch of images of these finalists may be drawn."""
        return self.timetable is None or self.left_s > self.timetable.seconds_of_images(undecided)


@dataclass
class Timetable:
    """Estimates of the remaining steps, and deadlines."""

    pace: Pace
    plan: ImagePlan
    judges: bool  # whether images are compared with the baseline's
    ends_at: float | None = None  # of the clock; None without a limit
    total_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    starting_s: float = 0.0  # before the baseline was measured
    looks: dict[Recipe, int] = field(default_factory=dict)  # batches of a final's images
    results: dict[Recipe, Result] = field(default_factory=dict)  # the last of each recipe

    def spend(self, minutes: float | None, began: float) -> None:
        """Set how long the search may last."""
        if minutes is not None:
            self.total_s = 60 * minutes
            self.ends_at = began + self.total_s
            self.starting_s = self.clock() - began
            self.pace.long_s = min(self.pace.long_s, _LONG_SHARE * self.total_s)

    def note(self, results: Iterable[Result]) -> None:
        """Record results."""
        self.results |= {result.recipe: result for result in results}

    @property
    def placeholder(self) -> Result:
        """Return a finalist without results, assumed to be faster than the baseline."""
        seconds = _OF_THE_BASELINE * self.pace.base_s / self.pace.batch
        return Result(Recipe(), Outcome.MEASURED, Rung.SCREENED, seconds=seconds)

    def prompts_to_come(self, rung: Rung, recipe: Recipe) -> float:
        """Return how many prompts will decide on quality: the usual number, or what remains after an unclear final."""
        if rung is not Rung.FINAL:
            return self.plan.prompts_at(min(_USUAL_LOOKS, len(self.plan.sizes)) - 1)
        is_over = self.looks.get(recipe, 1) >= len(self.plan.sizes)
        return 0.0 if is_over else self.plan.prompts_at(len(self.plan.sizes) - 1)

    def seconds_of_batch(self, recipes: Sequence[Recipe]) -> float:
        judging = 0.5 if self.judges else 0.0
        return (1 + judging) * sum(self.pace.of_trial(recipe) for recipe in (Recipe(), *recipes))

    def seconds_of_final(self, finalists: Sequence[Result]) -> float:
        """Estimate the seconds of a final with the usual number of images; of the smallest without a finalist."""
        seconds = self.seconds_of_rounds(finalists)
        undecided = [
            result for result in finalists if result.rung < Rung.FINAL or result.gate is not Gate.PASSED
        ]
        if not self.judges or not undecided:
            return seconds
        usual = _LOOKS_AT_BOLD if self.looks.get(Recipe()) else _USUAL_LOOKS
        looks = range(1, min(usual, len(self.plan.sizes)))
        return seconds + sum(self._seconds_of_look(undecided[:2], look) for look in looks)

    def seconds_of_rounds(self, finalists: Sequence[Result]) -> float:
        """Estimate a final's rounds with first images. Earlier ones are kept, unless all finalists have them."""
        finalists = [result for result in finalists if result.rung < Rung.FINAL] or finalists
        images, drawn = self._first_images
        return self.pace.of_final(finalists, FINAL_ROUNDS, images, drawn=drawn)

    def seconds_of_images(self, finalists: Sequence[Result]) -> float:
        """Estimate the seconds of the next batch of images of these finalists."""
        look = min((self.looks.get(result.recipe, 1) for result in finalists), default=1)
        return self._seconds_of_look(finalists, look) if look < len(self.plan.sizes) else 0.0

    def minutes_to_decide(self, finalist: Result) -> float:
        """Estimate the minutes that a continued search needs to decide on a recipe, in halves."""
        looks = range(self.looks.get(finalist.recipe, 1), len(self.plan.sizes)) if self.judges else ()
        seconds = self.starting_s + _ROOM_TO_DECIDE * (
            self.pace.of_final([finalist], FINAL_ROUNDS, self._first_images[0])
            + sum(self._seconds_of_look([finalist], look) for look in looks)
        )
        return math.ceil(seconds / 30) / 2

    def _seconds_of_look(self, finalists: Sequence[Result], look: int) -> float:
        images = self.plan.num_images(look)
        drawn = images if self.looks.get(Recipe(), 0) > look else 0
        return self.pace.of_images(finalists, images, drawn=drawn)

    @property
    def _first_images(self) -> tuple[int, int]:
        """Return the images of a final's rounds, and how many of the baseline's an earlier final has drawn."""
        images = self.plan.sizes[0] if self.judges else 0
        return images, images if self.looks.get(Recipe()) else 0

    def timeout_s(self, recipes: Sequence[Recipe], usual_s: float) -> float:
        """Return the timeout of a round before the final: a recipe that hangs must not take the whole search's time."""
        if self.ends_at is None:
            return usual_s
        expected = max(map(self.pace.of_trial, (Recipe(), *recipes)))  # the baseline has a round, too
        return min(usual_s, max(_LEAST_TIMEOUT_S, MOST_OF_THE_TIME * self.total_s, _LATE * expected))

    def deadline(self, recipes: Sequence[Recipe], rung: Rung) -> Deadline | None:
        """Return when a comparison has to end: the final with the search, others in time for a short final."""
        if self.ends_at is None:
            return None
        trials = (Recipe(), *recipes)
        images, drawn = self._first_images
        if rung is not Rung.FINAL:
            until = self.ends_at - self.pace.of_final(
                [self.placeholder],
                FINAL_ROUNDS if self.judges else 1,
                images,
                drawn=drawn,
            )
            each = [self.pace.of_trial(recipe) for recipe in trials]
            return Deadline(until, until, each, each, self.clock)
        results = [self.results.get(recipe) for recipe in recipes]
        quality_s = self.pace.of_quality(len(trials), images)
        first = [
            self.pace.of_final_round(None, images - drawn),
            *(self.pace.of_final_round(result, images) for result in results),
        ]
        later = [self.pace.of_final_round(result, 0) for result in (None, *results)]
        return Deadline(
            self.ends_at - quality_s, self.ends_at + _GRACE * self.total_s, first, later, self.clock
        )

    def deadline_of_images(self, recipes: Sequence[Recipe], look: int) -> Deadline | None:
        """Return when a further batch of images has to end."""
        if self.ends_at is None:
            return None
        images = self.plan.num_images(look)
        is_drawn = self.looks.get(Recipe(), 0) > look
        each = [
            self.pace.of_drawing(None, 0 if is_drawn else images),
            *(self.pace.of_drawing(self.results.get(recipe), images) for recipe in recipes),
        ]
        quality_s = self.pace.of_quality(1 + len(recipes), images)
        return Deadline(
            self.ends_at - quality_s, self.ends_at + _GRACE * self.total_s, each, each, self.clock
        )
