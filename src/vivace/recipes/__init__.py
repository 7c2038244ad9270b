"""Recipes: checked, edited, printed, and described."""

from vivace.recipes.recipe import Conflict, Recipe, conflicts
from vivace.recipes.resolve import resolve

__all__ = ["Conflict", "Recipe", "conflicts", "resolve"]
