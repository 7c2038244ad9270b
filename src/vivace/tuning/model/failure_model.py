"""Techniques that probably make recipes fail, by the failures and successes so far."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from vivace.foundation.spec.record import Outcome
from vivace.foundation.stats import Gate
from vivace.recipes.recipe import Recipe
from vivace.tuning.search.results import RUINED, Result

_NOT_YET = frozenset({Outcome.CRASHED, Outcome.TIMED_OUT})
_SURE = 0.9


@lru_cache(maxsize=100_000)
def texts_of(recipe: Recipe) -> frozenset[str]:
    """Return the texts of a recipe's techniques."""
    return frozenset(technique.text for technique in recipe)


def failure_probabilities(history: Sequence[Result]) -> dict[frozenset[str], float]:
    """Return the probability that each technique, alone or in pairs, makes recipes fail.

    For a recipe with ruined images these are the techniques that were in no recipe of passing quality.
    """
    good: set[frozenset[str]] = set()
    kept: set[str] = set()
    for result in history:
        if result.is_measured:
            good |= _parts(result.recipe)
        if result.slack is not None and result.gate is not Gate.FAILED:
            kept |= texts_of(result.recipe)
    blame: dict[frozenset[str], float] = {}
    for result in history:
        # A recipe that misses the limit by less may pass with other techniques: ending guidance gives back what a cache
        # loses.
        if result.gate is Gate.FAILED and (result.slack is None or result.slack < -RUINED):
            suspected = texts_of(result.recipe) - kept
            for text in suspected:
                part = frozenset((text,))
                blame[part] = max(blame.get(part, 0.0), _SURE / len(suspected))
    for result in history:
        if result.is_measured or result.outcome in (Outcome.FAILED_QUALITY, Outcome.OUT_OF_MEMORY):
            continue
        suspects = _parts(result.recipe) - good
        for part in suspects:
            weight = 0.5 if result.outcome in _NOT_YET else 1.0
            # Each failure adds to the blame, so that the common part of all of them is soon avoided.
            blame[part] = 1 - (1 - blame.get(part, 0.0)) * (1 - _SURE * weight / len(suspects))
    return blame


def _parts(recipe: Recipe) -> set[frozenset[str]]:
    texts = texts_of(recipe)
    return {frozenset((a, b)) for a in texts for b in texts}


def probability_of_running(recipe: Recipe, blame: dict[frozenset[str], float]) -> float:
    """Return the probability that no part of a recipe makes it fail."""
    probability = 1.0
    if blame:
        for part in _parts(recipe):
            probability *= 1 - blame.get(part, 0.0)
    return probability
