"""Choose the recipes to measure next. All samplers see the same history and differ only in how they choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from vivace.errors import RecipeError
from vivace.recipes.recipe import Recipe
from vivace.tuning.priors import PriorSource
from vivace.tuning.regression import Prior
from vivace.tuning.results import Result, latest
from vivace.tuning.space import Space
from vivace.tuning.utility import TRIES, AsMeasured, value_of, with_option

Name = Literal["model", "tpe", "random", "greedy"]


class Sampler(Protocol):
    """Chooses recipes."""

    def ask(self, history: Sequence[Result], number: int) -> list[Recipe]:
        """Return up to `number` recipes that are not in the history; none if there is nothing left to try."""
        ...

    def promise(self, results: Sequence[Result], history: Sequence[Result]) -> list[float]:
        """Return the promise of each measured recipe: its gain, discounted by the doubts about its quality."""
        ...

    def values(self, results: Sequence[Result], history: Sequence[Result]) -> NDArray[np.float64]:
        """Return posterior samples of each recipe's value (samples, recipes): its gain where it passes, else at most
        the gain that a proposal must exceed."""
        ...

    def shorter(self, recipe: Recipe, history: Sequence[Result]) -> Recipe:
        """Return the recipe without techniques expected to gain nothing; unchanged without a model."""
        ...

    def assembled(self, recipe: Recipe, history: Sequence[Result]) -> Recipe:
        """Return the recipe with techniques expected to make it faster, and to keep its quality."""
        ...

    def expected_gains(
        self, recipes: Sequence[Recipe], history: Sequence[Result]
    ) -> list[tuple[float, float]] | None:
        """Return the mean and the standard deviation of each recipe's gain; None without a model of gains."""
        ...


def sampler_of(
    name: Name,
    space: Space,
    *,
    sources: Sequence[PriorSource] = (),
    effects: dict[str, Prior] | None = None,
    start: Recipe | None = None,
    seconds_of: Callable[[Recipe], float] | None = None,
    most_s: Callable[[], float] = lambda: math.inf,
    peaks: Mapping[Recipe, float | None] | None = None,
    seed: int = 0,
) -> Sampler:
    """Return the sampler of that name. For the arguments of "model" see `ModelSampler`.

    Raises:
        Unsupported: "tpe" without Optuna.
    """
    rng = np.random.default_rng(seed)
    match name:
        case "random":
            return RandomSampler(space, rng)
        case "greedy":
            return GreedySampler(space, rng)
        case "tpe":
            from vivace.tuning.tpe import TpeSampler

            return TpeSampler(space, seed)
        case "model":
            from vivace.tuning.by_model import ModelSampler

            known_peaks = {} if peaks is None else peaks
            return ModelSampler(
                space, rng, tuple(sources), effects or {}, start, seconds_of, most_s, known_peaks
            )


@dataclass
class RandomSampler(AsMeasured):
    """Random recipes: as many techniques as a recipe has on average, each option as likely as any other."""

    space: Space
    rng: np.random.Generator

    def ask(self, history: Sequence[Result], number: int) -> list[Recipe]:
        measured = {result.recipe for result in history}
        recipes: dict[Recipe, None] = {}
        if self.space.listed is not None:
            left = [
                recipe for recipe in self.space.listed if recipe not in measured and self.space.holds(recipe)
            ]
            order = self.rng.permutation(len(left))[:number]
            return [left[int(i)] for i in order]
        for _ in range(TRIES * number):
            recipe = self.space.base()
            for _ in range(int(self.rng.integers(1, 5))):
                option = self.space.options[int(self.rng.integers(len(self.space.options)))]
                try:
                    recipe = recipe.with_(option)
                except RecipeError:
                    continue
            if recipe not in measured and not recipe.is_baseline and self.space.holds(recipe):
                recipes[recipe] = None
            if len(recipes) == number:
                break
        return list(recipes)


@dataclass
class GreedySampler(AsMeasured):
    """One at a time, as people do: every option alone, then the best one with every other, and so on."""

    space: Space
    rng: np.random.Generator

    def ask(self, history: Sequence[Result], number: int) -> list[Recipe]:
        results = latest(history)
        current = self.space.base()
        best = 0.0
        while True:
            above = [r for o in self.space.options if (r := with_option(current, o)) and self.space.holds(r)]
            left = [recipe for recipe in above if recipe not in results]
            if left:
                order = self.rng.permutation(len(left))[:number]
                return [left[int(i)] for i in order]
            good = [r for r in above if value_of(results[r], self.space.objective) > best]
            if not good:
                return []
            current = max(good, key=lambda r: value_of(results[r], self.space.objective))
            best = value_of(results[current], self.space.objective)
