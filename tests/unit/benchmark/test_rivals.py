"""Each step cache is compared with fewer plain steps."""

from pathlib import Path

import pytest

import vivace
from vivace.benchmark.comparison import comparisons, with_rivals
from vivace.errors import UsageError, WorkloadError
from vivace.foundation.spec.record import Outcome
from vivace.foundation.spec.study import Study
from vivace.foundation.spec.timing import Timing
from vivace.models.prompts import NUM_SEEDS, PROMPT_SETS
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.runtime.workloads import checked_request


def texts(recipes: list[str], steps: int = 28) -> list[str]:
    return [recipe.text for recipe in with_rivals([resolve(r) for r in recipes], steps)]


def compared(recipes: list[str], *, rivals: bool = True) -> tuple[Recipe, ...]:
    (comparison,) = comparisons(Study.of("tiny-sd", recipes, rivals=rivals))
    return comparison.recipes


def test_only_step_caches_add_rivals() -> None:
    assert texts(["baseline", "fbcache(0.1)", "tiny_vae"]) == [
        "baseline", "first_block_cache(0.1)", "steps(21)", "steps(14)", "tiny_vae",
    ]  # fmt: skip


def test_a_rival_keeps_all_techniques_except_the_cache() -> None:
    assert texts(["bf16+fbcache(0.1)+tiny_vae@vae+steps(20)"]) == [
        "tiny_vae+dtype(bf16)+first_block_cache(0.1)+steps(20)",
        "tiny_vae+dtype(bf16)+steps(15)",
        "tiny_vae+dtype(bf16)+steps(10)",
    ]


def test_rivals_are_measured_once() -> None:
    assert texts(["fbcache(0.1)", "fbcache(0.2)", "steps(14)"]) == [
        "first_block_cache(0.1)", "steps(21)", "first_block_cache(0.2)", "steps(14)",
    ]  # fmt: skip


def test_rivals_can_be_declined() -> None:
    recipes = ["baseline", "fbcache(0.1)"]
    assert len(compared(recipes)) == 4
    assert [r.text for r in compared(recipes, rivals=False)] == [
        "baseline",
        "first_block_cache(0.1)",
    ]


@pytest.mark.parametrize("name", PROMPT_SETS)
def test_a_prompt_set_is_thirteen_prompts_at_three_seeds(name: str) -> None:
    workload = checked_request("tiny-sd", "baseline", prompt_set=name).workload
    assert len(set(workload.prompts)) == 13
    assert len(workload.seeds) == NUM_SEEDS
    assert len(checked_request("tiny-sd", "baseline", prompt_set=name, num_seeds=1).workload.seeds) == 1


def test_wrong_prompt_sets_are_named() -> None:
    with pytest.raises(UsageError, match="did you mean 'tinyworld'"):
        checked_request("tiny-sd", "baseline", prompt_set="tinyword")
    with pytest.raises(UsageError, match="give one of them"):
        checked_request("tiny-sd", "baseline", prompt_set="real", prompts=["a cat"])
    with pytest.raises(WorkloadError, match="num-seeds 0 must be at least 1"):
        checked_request("tiny-sd", "baseline", prompt_set="real", num_seeds=0)


def test_rivals_of_a_cache_that_cannot_run_are_not_measured(tmp_path: Path) -> None:
    records = vivace.bench(
        "tiny-sd", ["baseline", "fbcache(0.1)"], prompts=["a red circle"], num_inference_steps=4, device="cpu",
        timing=Timing(rounds=1, repeats=1, max_warmup=1), quality=False, store=tmp_path / "s",
    )  # fmt: skip
    assert [(r.trial.recipe.text, r.outcome) for r in records] == [
        ("baseline", Outcome.MEASURED),
        ("first_block_cache(0.1)", Outcome.UNSUPPORTED),
    ]
