"""The settings of each side are told as they were, whoever changed them."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.drawn_shapes import draw
from vivace import prove
from vivace.proofs.sides.plan import DrawRequest, prepare
from vivace.proofs.verdicts.proof import Proof

PROMPT = "a red circle above a blue square"


def proof_of(a: str, b: str, store: Path, **more: Any) -> Proof:
    return prove(a, b, prompts=[PROMPT], num_seeds=1, scorer=None, claims=("same",), store=store, **more)


def test_a_recipes_steps_are_on_the_terminal_the_page_and_in_json(tmp_path: Path) -> None:
    proof = proof_of("tiny-sd:steps:2", "tiny-sd:guidance(2)+steps(3)", tmp_path, height=64, width=64)
    told = proof.to_dict()
    assert (told["settings_a"]["num_inference_steps"], told["settings_b"]["num_inference_steps"]) == (2, 3)
    assert told["settings_b"]["guidance_scale"] == 2
    assert "num_inference_steps" not in told["settings"]
    assert (told["settings"]["width"], told["settings"]["scheduler"]) == (
        64,
        "EulerAncestralDiscreteScheduler",
    )
    for text in (" ".join(str(proof).split()), proof.page()):
        assert "64 × 64 px" in text
        assert "A: 2 steps" in text
        assert "B: 3 steps, guidance 2" in text
        assert "25 steps" not in text


@pytest.mark.parametrize(
    ("recipe", "asked"),
    [
        ("steps(3)", (3, 4.0)),
        ("guidance(2)", (25, 2.0)),
        ("distilled(lcm)", (4, 1.0)),
        ("distilled(lcm, steps=2)", (2, 1.0)),
        ("bf16", (25, 4.0)),
    ],
)
def test_what_is_no_recipe_is_asked_for_what_the_recipe_draws(recipe: str, asked: tuple[int, float]) -> None:
    shapes = "python:tests.drawn_shapes:draw"
    for sides in ((f"tiny-sd:{recipe}", shapes), (shapes, f"tiny-sd:{recipe}")):
        settings = prepare(*sides, DrawRequest(prompts=(PROMPT,))).settings
        assert (settings.num_inference_steps, settings.guidance_scale) == asked
    own = prepare("tiny-sd:baseline", f"tiny-sd:{recipe}", DrawRequest(prompts=(PROMPT,))).settings
    assert own.num_inference_steps == 25, "each recipe draws with its own"
    given = DrawRequest(prompts=(PROMPT,), num_inference_steps=7)
    assert prepare(shapes, "tiny-sd:baseline", given).settings.num_inference_steps == 7


def test_folders_and_functions_tell_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    facts = PngInfo()
    for name, value in {"num_inference_steps": "9", "guidance_scale": "3.5", "size": "96x96"}.items():
        facts.add_text(name, value)
    picture: Image.Image = draw(PROMPT, 0)
    picture.save(folder / "x.png", pnginfo=facts)
    proof = proof_of(str(folder), "python:tests.drawn_shapes:draw_soft_if_tall", tmp_path / "store")
    assert proof.settings["a"] == {"width": 96, "height": 96, "num_inference_steps": 9, "guidance_scale": 3.5}
    assert proof.settings["b"] == {"width": 96, "height": 96}
