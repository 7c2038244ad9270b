"""Predicted peaks of recipes by `vivace plan`, computed once each, and bounds where it predicts none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from vivace.errors import RecipeError
from vivace.evidence.recorded import all_recorded
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve

Predict = Callable[[Sequence[Recipe]], Sequence[float | None]]


@dataclass
class Peaks:
    """Predicted peaks on one GPU in bytes, by recipe; None where there is no prediction."""

    predict: Predict
    predicted: dict[Recipe, float | None] = field(default_factory=dict)

    def ask(self, recipes: Sequence[Recipe]) -> None:
        """Predict all missing peaks at once: most of the time is spent on starting the process."""
        missing = [recipe for recipe in dict.fromkeys(recipes) if recipe not in self.predicted]
        if missing:
            self.predicted.update(zip(missing, self.predict(missing), strict=True))

    def add(self, recorded: Mapping[Recipe, float]) -> None:
        for recipe, peak in recorded.items():
            if self.predicted.get(recipe) is None:
                self.predicted[recipe] = peak

    def of(self, recipe: Recipe) -> float | None:
        self.ask([recipe])
        return self.predicted[recipe]

    def least(self, recipes: Sequence[Recipe]) -> list[float | None]:
        """Return the peak of each recipe, or a lower bound of it; None if nothing is known.

        Some techniques have no prediction, such as captured graphs. Unless they save memory, the recipe needs at least
        as much as without them.
        """
        self.ask(recipes)
        singles = {
            technique: Recipe((technique,))
            for recipe in recipes
            if self.predicted[recipe] is None
            for technique in recipe
            if not technique.facts.saves_memory
        }
        self.ask(list(singles.values()))
        without = {
            recipe: Recipe(
                tuple(t for t in recipe if t not in singles or self.predicted[singles[t]] is not None)
            )
            for recipe in recipes
            if self.predicted[recipe] is None
        }
        self.ask(list(without.values()))
        return [self.predicted[without.get(recipe, recipe)] for recipe in recipes]


def recorded(model: str, height: int | None, width: int | None) -> dict[Recipe, float]:
    peaks: dict[Recipe, float] = {}
    for (name, text, *size), every in all_recorded().items():
        if (name, size) != (model, [height, width]):
            continue
        try:
            peaks[resolve(text)] = float(max(figures.peak_bytes for figures in every))
        except RecipeError:  # of an older vivace
            continue
    return peaks
