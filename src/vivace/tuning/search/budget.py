"""Budget of a search: a number of recipes, of minutes, or both."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vivace.recipes.recipe import Recipe
from vivace.tuning.search.results import Result
from vivace.tuning.search.timetable import MOST_OF_THE_TIME

ROOM = 1.25
"""Factor by which a final may take longer than estimated."""
_FIRST_HALF = 0.5
_MOST_OF_THE_SPARE = 0.75
"""Share of the time before the final that one recipe may take: compiling SDXL as a whole takes two minutes and may pay
off."""


class Budget(Protocol):
    """Budget of further measurements."""

    @property
    def number(self) -> float:
        """Recipes to measure, the baseline not counted; infinite if only time limits them."""
        ...

    @property
    def most_s(self) -> float:
        """Longest expected time of a recipe before the final, in seconds; infinite without a time limit."""
        ...

    def affordable(self, recipes: list[Recipe], finalists: Sequence[Result]) -> list[Recipe]:
        """Return the first recipes, as many as can be measured before the final."""
        ...

    def is_over(self, num_trials: int, finalists: Sequence[Result]) -> bool:
        """Whether only the final still fits, given the number of recipes that have been measured."""
        ...

    def is_time_to_prove(self, finalists: Sequence[Result]) -> bool:
        """Whether the first final has to begin, so that there is an answer in the first half of the time."""
        ...

    def allows_another_final(self) -> bool: ...

    def allows_rounds(self, finalists: Sequence[Result]) -> bool:
        """Whether all rounds of a final fit."""
        ...

    def allows_images(self, undecided: Sequence[Result]) -> bool:
        """Whether another batch of images of these finalists may be drawn."""
        ...


@dataclass
class Trials:
    """A budget of recipes, the baseline not counted."""

    number: int
    most_s: float = math.inf

    def affordable(self, recipes: list[Recipe], finalists: Sequence[Result]) -> list[Recipe]:
        return recipes

    def is_over(self, num_trials: int, finalists: Sequence[Result]) -> bool:
        return num_trials >= self.number

    def is_time_to_prove(self, finalists: Sequence[Result]) -> bool:
        return False

    def allows_another_final(self) -> bool:
        return True

    def allows_rounds(self, finalists: Sequence[Result]) -> bool:
        return True

    def allows_images(self, undecided: Sequence[Result]) -> bool:
        return True


class Timed(Protocol):
    """Estimates the times of a final, of a further batch of its images, and of a batch of recipes with its baseline."""

    def seconds_of_batch(self, recipes: Sequence[Recipe]) -> float: ...
    def seconds_of_final(self, finalists: Sequence[Result]) -> float: ...
    def seconds_of_rounds(self, finalists: Sequence[Result]) -> float: ...
    def seconds_of_images(self, finalists: Sequence[Result]) -> float: ...


@dataclass
class Minutes:
    """A budget of time that keeps enough for the final."""

    minutes: float
    bench: Timed
    started: float = field(default_factory=time.monotonic)
    clock: Callable[[], float] = time.monotonic
    final_s: float = 0.0
    number: float = math.inf

    @property
    def left_s(self) -> float:
        return 60 * self.minutes - (self.clock() - self.started)

    @property
    def spare_s(self) -> float:
        """Seconds until the final must begin, by the finalists of the last query."""
        return self.left_s - self.final_s

    @property
    def most_s(self) -> float:
        """Longest expected time of a recipe before the final, in seconds."""
        share = max(MOST_OF_THE_TIME * 60 * self.minutes, _MOST_OF_THE_SPARE * self.spare_s)
        return min(share, self.spare_s)

    def affordable(self, recipes: list[Recipe], finalists: Sequence[Result]) -> list[Recipe]:
        self.is_over(0, finalists)
        chosen: list[Recipe] = []
        for recipe in recipes:
            if self.bench.seconds_of_batch([*chosen, recipe]) < self.spare_s:
                chosen.append(recipe)
        return chosen

    def is_over(self, num_trials: int, finalists: Sequence[Result]) -> bool:
        self.final_s = ROOM * self.bench.seconds_of_final(finalists)
        return self.spare_s < 0

    def is_time_to_prove(self, finalists: Sequence[Result]) -> bool:
        spent_s = 60 * self.minutes - self.left_s
        return spent_s + ROOM * self.bench.seconds_of_final(finalists) > _FIRST_HALF * 60 * self.minutes

    def allows_another_final(self) -> bool:
        """Whether there is time for one round of it."""
        return self.left_s > self.bench.seconds_of_final([]) / 2

    def allows_rounds(self, finalists: Sequence[Result]) -> bool:
        return self.left_s > ROOM * self.bench.seconds_of_rounds(finalists)

    def allows_images(self, undecided: Sequence[Result]) -> bool:
        return self.left_s > self.bench.seconds_of_images(undecided)


@dataclass
class Both:
    """A budget of trials and of time."""

    number: int
    time: Minutes

    def affordable(self, recipes: list[Recipe], finalists: Sequence[Result]) -> list[Recipe]:
        return self.time.affordable(recipes, finalists)

    def is_over(self, num_trials: int, finalists: Sequence[Result]) -> bool:
        return num_trials >= self.number or self.time.is_over(num_trials, finalists)

    @property
    def most_s(self) -> float:
        return self.time.most_s

    def is_time_to_prove(self, finalists: Sequence[Result]) -> bool:
        return self.time.is_time_to_prove(finalists)

    def allows_another_final(self) -> bool:
        return self.time.allows_another_final()

    def allows_rounds(self, finalists: Sequence[Result]) -> bool:
        return self.time.allows_rounds(finalists)

    def allows_images(self, undecided: Sequence[Result]) -> bool:
        return self.time.allows_images(undecided)
