"""`best` in a recipe: what it becomes on a card, and that it says why."""

from pathlib import Path

import pytest

from vivace.errors import RecipeError
from vivace.evidence.recommendation import advise, best
from vivace.evidence.recommendation.best import BestRecipe, best_recipe, is_best
from vivace.foundation.hardware.this_machine import Present
from vivace.recipes.resolve import resolve


@pytest.fixture(autouse=True)
def _no_own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make demo` leaves some in the folder where tests run."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch):
    """Pretend that this machine has an H200 with so much free memory, on which some recipes are refused."""

    def pretend(free_gb: float = 140.0, refused: str = "nothing") -> None:
        card = Present("NVIDIA H200", int(141e9), int(free_gb * 1e9))
        for module in (best, advise):
            monkeypatch.setattr(module, "present_gpu", lambda: card)
        monkeypatch.setattr(advise, "this_gpu", lambda: card.name)
        monkeypatch.setattr("vivace.measure.machine.choose_device", lambda device: "cuda")
        monkeypatch.setattr(
            best, "_refusal", lambda model, recipe, *rest: f"no {refused} here" if refused in recipe else None
        )

    return pretend


def test_it_is_the_fastest_that_keeps_the_image_and_says_what_that_rests_on(on_h200) -> None:
    on_h200()
    chosen = best_recipe("best", "sdxl")
    assert "fused" in chosen.recipe
    assert resolve(chosen.recipe).same_picture
    assert "results/" in chosen.why
    assert "keeps the image" in chosen.why
    assert str(chosen).count("\n") == 0


def test_less_free_memory_or_a_limit_gives_a_smaller_recipe(on_h200) -> None:
    on_h200()
    roomy = best_recipe("best", "flux-dev")
    assert best_recipe("best(16GB)", "flux-dev").recipe != roomy.recipe
    on_h200(free_gb=17.0)
    assert best_recipe("best", "flux-dev").recipe != roomy.recipe


def test_what_cannot_run_is_passed_over_in_words(on_h200) -> None:
    on_h200(refused="fused")
    chosen = best_recipe("best", "sdxl")
    assert "fused" not in chosen.recipe
    assert "no fused here" in chosen.why


def test_what_stands_beside_it_stays(on_h200) -> None:
    on_h200()
    chosen = resolve(best_recipe("steps(20)+best", "sdxl").recipe)
    assert {"steps", "fused"} <= {technique.name for technique in chosen}


def test_on_a_cpu_where_nothing_is_known_it_is_the_baseline() -> None:
    assert best_recipe("best", "synthetic:sd15", device="cpu") == BestRecipe(
        "baseline", "nothing faster is known to keep the image here"
    )


def test_changed_images_are_asked_for() -> None:
    assert "distilled" in best_recipe("best(changes=True)", "tiny-sd", device="cpu").recipe


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        ("best+best", "twice"),
        ("best@vae", "no target"),
        ("best(quality=1)", "changes=True"),
        ("best(8GB, 9GB)", "each once"),
        ("best(soon)", "amount of memory"),
        ("best+nothing_such", "nothing_such"),
    ],
)
def test_mistakes_are_named(recipe: str, named: str) -> None:
    assert is_best(recipe)
    with pytest.raises(RecipeError, match=named):
        best_recipe(recipe, "tiny-sd", device="cpu")


def test_where_no_model_is_known_it_is_refused_in_words() -> None:
    with pytest.raises(RecipeError, match="depends on the model and the card"):
        resolve("bf16+best")
    assert not is_best("bf16+")
