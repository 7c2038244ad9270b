"""What samplers share: what a measured recipe is worth, and how likely its quality passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vivace.errors import RecipeError
from vivace.recipes.recipe import Recipe
from vivace.stats import Gate
from vivace.tuning.seen import Rung, Seen, latest
from vivace.tuning.wanted import Wanted

TRIES = 200
"""How often a random recipe is drawn for each that is wanted."""

WORLDS = 512
"""In which recipes pass or fail, and are as fast as they may be."""

_ANY_GAIN = -3.0
_AS_FAST, _NOISE = 0.01, 0.03
"""A shorter recipe is as fast if it is this much slower, as a logarithm: at any rate, and within its interval."""
_ANOTHER = 0.005
"""The same of a shorter recipe that is no part of the best one."""


class AsMeasured:
    """Takes measurements as they are: a recipe promises what it gained, unless its quality is in doubt."""

    def worth(self, results: Sequence[Seen], history: Sequence[Seen]) -> list[float]:
        return [(one.gain or 0.0) * chance_of(one) for one in results]

    def values(self, results: Sequence[Seen], history: Sequence[Seen]) -> NDArray[np.float64]:
        """Each passes or fails by itself."""
        rng = np.random.default_rng(len(history))
        passes = rng.random((WORLDS, len(results))) < [chance_of(one) for one in results]
        return np.where(passes, [one.gain or 0.0 for one in results], _ANY_GAIN)

    def shorter(self, recipe: Recipe, history: Sequence[Seen]) -> Recipe:
        return recipe

    def assembled(self, recipe: Recipe, history: Sequence[Seen]) -> Recipe:
        return recipe


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


def shortest_as_fast(best: Seen, others: Sequence[Seen]) -> Seen:
    """Return the recipe with the fewest techniques that is as fast, as far as can be told."""
    mine = set(best.recipe.techniques)
    found = [
        one
        for one in others
        if (set(one.recipe.techniques) < mine and is_as_fast(one, best))
        or (len(one.recipe.techniques) < len(mine) and _gain(best) - _gain(one) <= _ANOTHER)
    ]
    return min([best, *found], key=lambda one: (len(one.recipe.techniques), -(one.gain or 0.0)))


def is_as_fast(one: Seen, best: Seen) -> bool:
    """Whether a recipe was not shown to be slower than the best: within 1 %, or within both intervals and 3 %."""
    told = 1.96 * math.hypot(one.own_error, best.own_error)
    return _gain(best) - _gain(one) <= max(_AS_FAST, min(_NOISE, told))


def _gain(one: Seen) -> float:
    return one.gain or 0.0


def best_of(history: Sequence[Seen]) -> Seen | None:
    """Return the best result so far whose quality has not failed; None if none is better than the baseline."""
    found = [
        one
        for one in latest(history).values()
        if one.is_measured and not one.is_ruined and _gain(one) > 0 and not one.recipe.is_baseline
    ]
    return max(found, key=lambda one: (one.rung > Rung.SCREENED, _gain(one)), default=None)
