"""Other ways to choose the recipes to measure next, as rivals of `vivace tune`'s model: chance, one at a time, TPE.

They take the place of a search's `ModelSampler`, and have its methods.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import optuna
from numpy.typing import NDArray

from benchmarks.recorded_grids import FixedSpace
from vivace.errors import RecipeError
from vivace.recipes.recipe import Recipe
from vivace.tuning.model.by_model import NUM_SAMPLES
from vivace.tuning.search.results import ANY_GAIN, Result, latest
from vivace.tuning.search.space import Space, with_option

Name = Literal["tpe", "greedy", "random"]
_TRIES = 200
"""Number of random recipes drawn for each one returned."""


def rival(name: Name, space: Space, seed: int = 0) -> Any:
    """Return the sampler of that name."""
    rng = np.random.default_rng(seed)
    match name:
        case "random":
            return RandomSampler(space, rng)
        case "greedy":
            return GreedySampler(space, rng)
        case "tpe":
            return TpeSampler(space, seed)


class AsMeasured:
    """Takes measurements as they are: a recipe's promise is its gain, unless its quality is in doubt."""

    def promise(self, results: Sequence[Result], history: Sequence[Result]) -> list[float]:
        return [(result.gain or 0.0) * result.chance for result in results]

    def values(self, results: Sequence[Result], history: Sequence[Result]) -> NDArray[np.float64]:
        """Draw samples in which each recipe passes or fails by itself."""
        rng = np.random.default_rng(len(history))
        passes = rng.random((NUM_SAMPLES, len(results))) < [result.chance for result in results]
        return np.where(passes, [result.gain or 0.0 for result in results], ANY_GAIN)

    def shorter(self, recipe: Recipe, history: Sequence[Result]) -> Recipe:
        return recipe

    def assemble(self, recipe: Recipe, history: Sequence[Result]) -> Recipe:
        return recipe


@dataclass
class RandomSampler(AsMeasured):
    """Random recipes: as many techniques as a recipe has on average, each option as likely as any other."""

    space: Space
    rng: np.random.Generator

    def ask(self, history: Sequence[Result], number: int) -> list[Recipe]:
        measured = {result.recipe for result in history}
        recipes: dict[Recipe, None] = {}
        if isinstance(self.space, FixedSpace):
            left = [
                recipe for recipe in self.space.recipes if recipe not in measured and self.space.holds(recipe)
            ]
            order = self.rng.permutation(len(left))[:number]
            return [left[int(i)] for i in order]
        for _ in range(_TRIES * number):
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
            good = [r for r in above if results[r].value(self.space.objective) > best]
            if not good:
                return []
            current = max(good, key=lambda r: results[r].value(self.space.objective))
            best = results[current].value(self.space.objective)


class TpeSampler(AsMeasured):
    """Optuna's tree-structured Parzen estimator: each technique is a choice between its options and nothing."""

    def __init__(self, space: Space, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.space = space
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # multivariate, group and constraints are marked experimental
            sampler = optuna.samplers.TPESampler(
                multivariate=True, group=True, constraints_func=_constraints, seed=seed
            )
        self._study = optuna.create_study(sampler=sampler, direction="maximize")
        self._asked: dict[Recipe, Any] = {}
        self._told: set[Recipe] = set()

    def ask(self, history: Sequence[Result], number: int) -> list[Recipe]:
        results = latest(history)
        self._tell(results)
        recipes: list[Recipe] = []
        for _ in range(_TRIES):
            trial = self._study.ask()
            recipe = self._recipe(trial)
            if recipe is not None and recipe in results:
                trial.set_user_attr("slack", constraint_of(results[recipe]))
                self._study.tell(trial, results[recipe].value(self.space.objective, failed=-1.0))
                continue
            if recipe is None or recipe in self._asked or recipe.is_baseline or not self.space.holds(recipe):
                self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
                continue
            self._asked[recipe] = trial
            recipes.append(recipe)
            if len(recipes) == number:
                break
        return recipes

    def _tell(self, results: dict[Recipe, Result]) -> None:
        for recipe, result in results.items():
            if recipe in self._told or recipe not in self._asked:
                continue
            self._told.add(recipe)
            trial = self._asked[recipe]
            trial.set_user_attr("slack", constraint_of(result))
            self._study.tell(trial, result.value(self.space.objective, failed=-1.0))

    def _recipe(self, trial: Any) -> Recipe | None:
        recipe = Recipe(self.space.objective.kept)
        by_name: dict[str, list[Any]] = {}
        for option in self.space.options:
            by_name.setdefault(option.name, []).append(option)
        for name, options in by_name.items():
            texts = [option.text for option in options]
            chosen = trial.suggest_categorical(name, ["", *texts])
            if chosen:
                more = with_option(recipe, options[texts.index(chosen)])
                if more is None:
                    return None
                recipe = more
        return recipe


def constraint_of(result: Result) -> float:
    """Return Optuna's constraint, which is feasible if not above zero."""
    if not result.is_measured:
        return 1.0
    return -1.0 if result.slack is None else -result.slack


def _constraints(trial: Any) -> tuple[float, ...]:
    return (float(trial.user_attrs.get("slack", 0.0)),)
