"""Optuna's TPE as a rival sampler, through its ask-and-tell interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vivace.errors import Unsupported
from vivace.recipes.recipe import Recipe
from vivace.tuning.results import Result, latest
from vivace.tuning.space import Space
from vivace.tuning.utility import TRIES, AsMeasured, constraint_of, value_of, with_option


class TpeSampler(AsMeasured):
    """Optuna's tree-structured Parzen estimator: each technique is a choice between its options and nothing."""

    def __init__(self, space: Space, seed: int) -> None:
        try:
            import optuna
        except ImportError:
            raise Unsupported("--sampler tpe needs Optuna: pip install 'vivace[tpe]'") from None
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.space = space
        self._optuna = optuna
        import warnings

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
        for _ in range(TRIES):
            trial = self._study.ask()
            recipe = self._recipe(trial)
            if recipe is not None and recipe in results:
                trial.set_user_attr("slack", constraint_of(results[recipe]))
                self._study.tell(trial, value_of(results[recipe], self.space.objective, failed=-1.0))
                continue
            if recipe is None or recipe in self._asked or recipe.is_baseline or not self.space.holds(recipe):
                self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
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
            self._study.tell(trial, value_of(result, self.space.objective, failed=-1.0))

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


def _constraints(trial: Any) -> tuple[float, ...]:
    return (float(trial.user_attrs.get("slack", 0.0)),)
