"""What is measured beside the finalists, because it may be the better answer: shorter recipes, and fuller ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vivace.recipes.recipe import Recipe
from vivace.tuning.finalists import MOST_USEFUL
from vivace.tuning.seen import Rung, Seen, gain_of, latest

if TYPE_CHECKING:
    from vivace.tuning.search import Search

REACH = 0.10
"""A recipe this much slower than the best so far, or two standard errors, is not worth judging."""


def shorter(search: Search, finalists: Sequence[Seen]) -> list[Recipe]:
    """Return the first finalist without what is believed to give nothing, if it may win and the time suffices."""
    first = finalists[0]
    less = search.sampler.shorter(first.recipe, search.history)
    if less.is_baseline or less in {one.recipe for one in finalists} or not search.space.holds(less):
        return []
    known = latest(search.history).get(less)
    if known is not None and (not known.keeps(search.wanted) or known.is_ruined):
        return []
    trials = search.num_trials if known is None else 0
    if search.budget.is_over(trials, [*finalists, replace(first, recipe=less)]):
        return []
    return [] if search.measurer.refuse([less]) else [less]


def assembled(search: Search, pick: Seen, others: Sequence[Seen]) -> list[Recipe]:
    """Return the pick with what works and is believed to make it faster, if trials and time suffice.

    What is tried is tried for what it tells, and the last trials mostly tell that it fails; this is for the answer.
    """
    recipe = search.sampler.assembled(pick.recipe, search.history)
    if recipe in {pick.recipe, *(one.recipe for one in others)}:
        return []
    known = latest(search.history).get(recipe)
    if known is None:
        if search.num_trials >= getattr(search.budget, "number", math.inf):
            return []
    elif known.rung is Rung.PROVEN or known.is_ruined or not known.keeps(search.wanted):
        return []
    if search.budget.is_over(0, [pick, *others, replace(pick, recipe=recipe)]):
        return []
    return [] if search.measurer.refuse([recipe]) else [recipe]


def with_common(search: Search, finalists: list[Recipe]) -> list[Recipe]:
    """Return the finalists with what they have in common in the place of the last of three, if it may be as fast.

    Where only techniques that keep the picture are searched, finalists mostly differ by what gives nothing, such
    as `tf32` in bf16, and no belief tells it from a gain of 1 %. Measured beside them, the common part is the
    answer if it is as fast.
    """
    shared = set.intersection(*(set(recipe.techniques) for recipe in finalists))
    common = Recipe(tuple(technique for technique in finalists[0] if technique in shared))
    if search.judges or len(finalists) < MOST_USEFUL or common.is_baseline or common in finalists:
        return finalists
    known = latest(search.history).get(common)
    best = max(gain_of(one) for one in latest(search.history).values() if one.recipe in finalists)
    is_slow = known is not None and not (known.keeps(search.wanted) and gain_of(known) > best - REACH)
    if is_slow or not search.space.holds(common) or search.measurer.refuse([common]):
        return finalists
    return [*finalists[:-1], common]
