"""What samplers share: what a measured recipe is worth, and how likely its quality passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

from vivace.errors import RecipeError
from vivace.recipes.recipe import Recipe
from vivace.stats import Gate
from vivace.tuning.seen import Seen
from vivace.tuning.wanted import Wanted

TRIES = 200
"""How often a random recipe is drawn for each that is wanted."""

_ANY_GAIN = -3.0


class AsMeasured:
    """Takes measurements as they are: a recipe promises what it gained, unless its quality is in doubt."""

    def worth(self, results: Sequence[Seen], history: Sequence[Seen]) -> list[float]:
        return [(one.gain or 0.0) * chance_of(one) for one in results]


def chance_of(one: Seen) -> float:
    """Return the probability that the quality of a recipe passes in full, by its own figures alone."""
    if one.slack is None:
        return 1.0
    if one.gate is Gate.FAILED:
        return 0.0
    return NormalDist().cdf(one.slack / one.slack_error)


def floor_of(history: Sequence[Seen], wanted: Wanted) -> float:
    """Return the gain that a proposal must exceed: the baseline's, 0, unless it breaks a limit itself."""
    baseline = next((one for one in history if one.recipe.is_baseline and one.is_measured), None)
    return 0.0 if baseline is None or baseline.keeps(wanted) else _ANY_GAIN


def constraint_of(one: Seen) -> float:
    """Return what Optuna calls feasible if it is not above zero."""
    if not one.is_measured:
        return 1.0
    return -1.0 if one.slack is None else -one.slack


def with_option(recipe: Recipe, option: Any) -> Recipe | None:
    try:
        return recipe.with_(option)
    except RecipeError:
        return None


def value_of(one: Seen, wanted: Wanted, failed: float = -math.inf) -> float:
    """Return the gain of a recipe that may be proposed; `failed` for others."""
    if one.gain is None or not one.keeps(wanted) or one.gate is Gate.FAILED or one.is_ruined:
        return failed
    if one.slack is not None and one.slack < 0 and failed == -math.inf:
        return failed
    return one.gain
