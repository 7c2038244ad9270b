"""Companions of the finalists that may be better answers: shorter recipes, and longer ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vivace.recipes.recipe import Recipe
from vivace.tuning.search.finalists import MOST_USEFUL
from vivace.tuning.search.results import Result, Rung, gain_of, latest

if TYPE_CHECKING:
    from vivace.tuning.search.search import Search

REACH = 0.10
"""Gap to the best so far, or two standard errors, beyond which a slower recipe is not judged."""


def shorter(search: Search, finalists: Sequence[Result]) -> list[Recipe]:
    """Return the first finalist without techniques expected to gain nothing, if it may win and there is time."""
    first = finalists[0]
    less = search.sampler.shorter(first.recipe, search.history)
    if less.is_baseline or less in {result.recipe for result in finalists} or not search.space.holds(less):
        return []
    result = latest(search.history).get(less)
    if result is not None and (not result.keeps(search.objective) or result.is_ruined):
        return []
    trials = search.num_trials if result is None else 0
    if search.budget.is_over(trials, [*finalists, replace(first, recipe=less)]):
        return []
    return [] if search.measurer.refuse([less]) else [less]


def propose_unmeasured(search: Search, results: Sequence[Result]) -> list[Result]:
    """Return the best results with what is expected to make them faster, as expected, where nothing has measured that.

    Trials are chosen for their information, and the last ones mostly fail; these recipes are chosen to be the answer.
    """
    if not search.judges or search.num_trials >= search.budget.number:
        return []
    longer: dict[Recipe, Result] = {}
    for result in results[:MOST_USEFUL]:
        recipe = search.sampler.assembled(result.recipe, search.history)
        if recipe not in latest(search.history):
            longer.setdefault(
                recipe, replace(result, recipe=recipe, rung=Rung.SCREENED, gate=None, slack=None)
            )
    refused = {result.recipe for result in search.measurer.refuse(list(longer))} if longer else set()
    return [result for recipe, result in longer.items() if recipe not in refused]


def with_common(search: Search, finalists: list[Recipe]) -> list[Recipe]:
    """Replace the last of three finalists by their common part, if that may be as fast.

    Where only techniques that keep the image are searched, finalists mostly differ by idle techniques, such as `tf32`
    in bf16, which the model cannot tell from a gain of 1 %. The common part, measured beside them, is the answer if it
    is as fast.
    """
    shared = set.intersection(*(set(recipe.techniques) for recipe in finalists))
    common = Recipe(tuple(technique for technique in finalists[0] if technique in shared))
    if search.judges or len(finalists) < MOST_USEFUL or common.is_baseline or common in finalists:
        return finalists
    result = latest(search.history).get(common)
    best = max(gain_of(result) for result in latest(search.history).values() if result.recipe in finalists)
    is_slow = result is not None and not (result.keeps(search.objective) and gain_of(result) > best - REACH)
    if is_slow or not search.space.holds(common) or search.measurer.refuse([common]):
        return finalists
    return [*finalists[:-1], common]


def unlike(search: Search, finalists: Sequence[Result]) -> list[Result]:
    """Return recipes that differ by more than techniques expected to gain nothing."""
    kept: dict[Recipe, Result] = {}
    for result in finalists:
        kept.setdefault(search.sampler.shorter(result.recipe, search.history), result)
    return list(kept.values())


def with_shorter(search: Search, finalists: Sequence[Result]) -> list[Result]:
    """Return the finalists, with the first one's shorter form if there is room."""
    less = search.sampler.shorter(finalists[0].recipe, search.history) if finalists else Recipe()
    if len(finalists) == MOST_USEFUL or less in {Recipe(), *(result.recipe for result in finalists)}:
        return list(finalists)
    return [*finalists, replace(finalists[0], recipe=less)]
