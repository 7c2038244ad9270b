"""Recipes of records, parsed once: an answer looks up the same few hundred texts many times."""

from __future__ import annotations

from functools import lru_cache

from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve as resolved


@lru_cache(maxsize=4096)
def resolve(text: str) -> Recipe:
    """Return the recipe of a text; see `vivace.recipes.resolve.resolve`."""
    return resolved(text)
