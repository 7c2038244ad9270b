"""Predictions of a model's memory under a recipe, from shapes alone."""
