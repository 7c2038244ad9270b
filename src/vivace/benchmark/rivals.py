"""Add rivals: for every step cache, the same recipe with fewer plain steps instead."""

from __future__ import annotations

from vivace.errors import RecipeError
from vivace.machinery.technique import Stage
from vivace.recipes.recipe import Recipe
from vivace.techniques.steps import Steps

# Shares of the steps that the cache's recipe takes. A cache that saves less than a quarter of the work is hardly worth
# using, and one that saves more than half has to beat half the steps first.
_SHARES = (0.75, 0.5)


def with_rivals(recipes: list[Recipe], num_inference_steps: int) -> list[Recipe]:
    """Return the recipes, each one with a step cache followed by its rivals, unless they are there already.

    Args:
        num_inference_steps: the workload's number of steps, for recipes that do not set it.
    """
    there = {recipe.text for recipe in recipes}
    recipes_with_rivals = []
    for recipe in recipes:
        rivals = [rival for rival in _rivals(recipe, num_inference_steps) if rival.text not in there]
        recipes_with_rivals += [recipe, *rivals]
        there |= {rival.text for rival in rivals}
    return recipes_with_rivals


def owners(
    recipes: list[Recipe], all_recipes: list[Recipe], num_inference_steps: int
) -> dict[int, tuple[int, ...]]:
    """Return, by the index of each rival in `all_recipes`, the indices of the recipes whose rival it is.

    Args:
        recipes: the requested ones, none of which is a rival.
        all_recipes: what `with_rivals` made of them.
    """
    texts = {recipe.text for recipe in recipes}
    places = {recipe.text: index for index, recipe in enumerate(all_recipes)}
    owners_of: dict[int, tuple[int, ...]] = {}
    for index, recipe in enumerate(all_recipes):
        for rival in _rivals(recipe, num_inference_steps):
            if rival.text not in texts:
                place = places[rival.text]
                owners_of[place] = (*owners_of.get(place, ()), index)
    return owners_of


def _rivals(recipe: Recipe, num_inference_steps: int) -> list[Recipe]:
    caches = [technique for technique in recipe if technique.stage is Stage.CACHE]
    if not caches:
        return []
    plain = recipe.without(*caches)
    steps = next((t.steps for t in plain if isinstance(t, Steps)), num_inference_steps)
    rivals = []
    for share in _SHARES:
        fewer = round(share * steps)
        if 1 <= fewer < steps:
            try:
                rivals.append(plain.without(Steps.name).with_(Steps(steps=fewer)))
            except RecipeError:
                continue  # another technique of the recipe sets the steps
    return rivals
