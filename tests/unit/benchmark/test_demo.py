"""The demo chooses its recipes by what is fast on the machine."""

import pytest

from vivace.benchmark.demo import LONGEST, demo_recipes
from vivace.benchmark.rounds.round import race
from vivace.recipes.resolve import resolve


def test_each_recipe_adds_one_change() -> None:
    recipes = demo_recipes({"baseline": 1.0, "bf16": 0.8, "int8": 0.9})
    assert len(recipes) == LONGEST
    assert recipes[:2] == ["baseline", "bf16"]
    sizes = [len(resolve(recipe).techniques) for recipe in recipes]
    assert sizes == list(range(LONGEST))


def test_a_change_that_does_not_help_is_left_out() -> None:
    recipes = demo_recipes({"baseline": 1.0, "bf16": 0.99, "fp16": 20.0})
    assert recipes[:2] == ["baseline", "tiny_vae"]
    assert len(recipes) == LONGEST - 1


@pytest.mark.long
def test_a_race_leaves_out_recipes_that_cannot_run() -> None:
    times = race("tiny-sd", ["baseline", "attention(cudnn)", "fp32", "attention(math)"], "cpu")
    assert set(times) == {"baseline", "attention(math)"}
    assert all(value > 0 for value in times.values())
