"""Recipes: checked, edited, printed, and described."""
