"""benchmarks.step_budgets: methods at equal computed steps, and the interval of their difference."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.step_budgets import (
    BUDGETS,
    STEPS,
    bisect_threshold,
    difference,
    methods,
)
from benchmarks.step_budgets import recipe_of as recipe_at
from vivace.recipes.resolve import resolve


@pytest.mark.parametrize("model", STEPS)
def test_every_method_that_needs_no_search_is_a_recipe(model: str, tmp_path: Path) -> None:
    drawing: Any = SimpleNamespace(model=model, num_steps=STEPS[model], draw=lambda recipe, _: ([], 7.0))
    for budget in BUDGETS:
        for method in methods(model):
            if not method.startswith("searched"):
                recipe = recipe_at(method, budget, drawing, tmp_path, 1, lambda: None)
                assert resolve(recipe).text == recipe or "," in method
    assert recipe_at("even steps, dmd", 5, drawing, tmp_path, 1, lambda: None).count("1") == 5


def test_a_threshold_is_found_whose_images_compute_as_many_steps() -> None:
    assert bisect_threshold(lambda threshold: 28 / (1 + threshold), 7, 0.01, 100.0, runs=12) == pytest.approx(
        3, abs=0.3
    )


def test_differences_are_paired_by_prompt() -> None:
    plain = [0.1, 0.5, 0.9, 0.1, 0.5, 0.9]
    mean, low, high = difference([value + 0.01 for value in plain], plain, 3)
    assert (mean, low, high) == pytest.approx((0.01, 0.01, 0.01))
    mean, low, high = difference([0.0, 0.6, 0.9, 0.1, 0.5, 1.0], plain, 3)
    assert low < mean < high
