"""Shared rules of samplers: the value of a measured recipe, and the probability that its quality passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from vivace.errors import RecipeError
from vivace.evidence.choice import simplest_of_best
from vivace.foundation.stats import Gate
from vivace.machinery.technique import Technique
from vivace.recipes.recipe import Recipe
from vivace.tuning.search.objective import Objective
from vivace.tuning.search.results import Result, Rung, latest

NUM_SAMPLES = 512
"""Number of posterior samples of whether recipes pass and how much they gain."""

ANY_GAIN = -3.0
_LEAST_LUCK = 0.004
_AS_FAST, _NOISE = 0.01, 0.03
"""Gap, as a logarithm, within which a shorter recipe counts as equally fast: always, and within its interval."""
_ANOTHER = 0.005
"""The same for a shorter recipe that is not part of the best one."""


def chance_of(result: Result) -> float:
    """Return the probability that the quality of a recipe passes in full, by its own figures alone."""
    is_final = result.rung is Rung.FINAL
    if result.slack is None or (is_final and result.gate is Gate.PASSED):
        return 1.0
    if result.gate is Gate.FAILED:
        return 0.0
    error = max(result.luck, _LEAST_LUCK) if is_final else math.hypot(result.slack_error, result.luck)
    return NormalDist().cdf(result.slack / error)


def floor_of(history: Sequence[Result], objective: Objective) -> float:
    """Return the gain that a proposal must exceed: the baseline's, 0, unless it breaks a limit itself."""
    baseline = next((result for result in history if result.recipe.is_baseline and result.is_measured), None)
    return 0.0 if baseline is None or baseline.keeps(objective) else ANY_GAIN


def with_option(recipe: Recipe, option: Technique) -> Recipe | None:
    """Return the recipe with one more technique; None if they conflict."""
    try:
        return recipe.with_(option)
    except RecipeError:
        return None


def value_of(result: Result, objective: Objective, failed: float = -math.inf) -> float:
    """Return the gain of a recipe that may be proposed; `failed` otherwise."""
    if result.gain is None or not result.keeps(objective) or result.gate is Gate.FAILED or result.is_ruined:
        return failed
    if result.slack is not None and result.slack < 0 and failed == -math.inf:
        return failed
    return result.gain


def shortest_as_fast(best: Result, others: Sequence[Result]) -> Result:
    """Return the recipe with the fewest techniques that is as fast, as far as measured."""
    shortest, _ = simplest_of_best(
        best,
        [best, *others],
        _is_shorter_and_as_fast,
        lambda result: (len(result.recipe.techniques), -_gain(result)),
    )
    return shortest


def _is_shorter_and_as_fast(result: Result, best: Result) -> bool:
    theirs, mine = set(result.recipe.techniques), set(best.recipe.techniques)
    if theirs < mine and is_as_fast(result, best):
        return True
    return len(theirs) < len(mine) and _gain(best) - _gain(result) <= _ANOTHER


def is_as_fast(result: Result, best: Result) -> bool:
    """Whether a recipe was not proven slower than the best: within 1 %, or within both intervals and 3 %."""
    error = 1.96 * math.hypot(result.own_error, best.own_error)
    return _gain(best) - _gain(result) <= max(_AS_FAST, min(_NOISE, error))


def _gain(result: Result) -> float:
    return result.gain or 0.0


def best_of(history: Sequence[Result]) -> Result | None:
    """Return the best result so far whose quality has not failed; None if none is better than the baseline."""
    candidates = [
        result
        for result in latest(history).values()
        if result.is_measured and not result.is_ruined and _gain(result) > 0 and not result.recipe.is_baseline
    ]
    return max(candidates, key=lambda result: (result.rung > Rung.SCREENED, _gain(result)), default=None)
