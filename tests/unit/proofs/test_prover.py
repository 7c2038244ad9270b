"""`vivace.prove` gives the answer of the command, says first what is wrong, and tells the settings of each side."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vivace
from tests.proved import PROMPTS, SHAPES, prove
from vivace.errors import Unsupported, UsageError
from vivace.proofs.sides.plan import DrawRequest, prepare
from vivace.proofs.verdicts.proof import Proof

CALL = {"prompts": PROMPTS, "num_seeds": 1, "scorer": None}


def without_times(proof: dict) -> dict:
    proof["speed"] = proof["answers"]["fast"] = None
    for pair in proof["pairs"]:
        pair["a"]["seconds"] = pair["b"]["seconds"] = None
    return proof


def test_it_answers_as_the_command_does(tmp_path: Path) -> None:
    soft, ends = "python:tests.drawn_shapes:draw_soft", []
    proof = vivace.prove(
        *(SHAPES, soft),
        **CALL,
        sizes=["96x64", (64, 96)],
        fail_under={"ssim": 0.1},
        store=tmp_path / "a",
        progress=lambda side, done, total: ends.append((side, done == total)),
    )
    assert [side for side, is_last in ends if is_last] == ["a", "b"]
    more = ("--sizes", "96x64,64x96", "--fail-under", "ssim=0.1", "--format")
    typed = prove(tmp_path, SHAPES, soft, *more, "json")
    assert without_times(json.loads(typed.stdout)) == without_times(json.loads(json.dumps(proof.to_dict())))
    assert proof.verdict == "failed"
    assert proof.exit_code == typed.return_value == 1
    lines = prove(tmp_path, SHAPES, soft, *more, "text").stdout.partition("Fast?")[0]
    assert lines == str(proof).partition("Fast?")[0]
    page = proof.page()
    assert "softer" in page
    assert "Reproduce" not in page


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"claims": ["pretty"]}, "claims=.*'pretty'.* must be one of 'same', 'as-good'"),
        ({"fail_under": {"sharpness": 1}}, "fail_under=.*sharpness"),
        ({"fail_under": {"ssim": 2}}, "ssim=2 is not from -1 to 1"),
        ({"prompt_set": "photos"}, "prompt_set='photos' must be one of"),
        ({"prompts": "a cat", "prompt_set": "real"}, "not both"),
        ({"num_prompts": 0}, "at least 1"),
        ({"height": -8}, "height=-8 must be at least 1"),
        ({"sizes": ["96"]}, "sizes=.* a size is WIDTHxHEIGHT"),
        ({"claims": "legible", "prompts": "a cat"}, "put them in quotes"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_drawn(tmp_path: Path, wrong: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        vivace.prove(SHAPES, SHAPES, scorer=None, store=tmp_path / "store", **wrong)
    with pytest.raises(Unsupported, match="is the server running"):
        vivace.prove(SHAPES, "http://127.0.0.1:9/v1", store=tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_the_function_stays_a_function_after_its_package_is_imported() -> None:
    code = "import sys, vivace.proofs.prover, vivace; assert callable(vivace.prove); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


PROMPT = "a red circle above a blue square"


def proof_of(a: str, b: str, store: Path, **more: Any) -> Proof:
    return vivace.prove(
        a, b, prompts=[PROMPT], num_seeds=1, scorer=None, claims=("same",), store=store, **more
    )


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
        ("distilled(lcm, steps=2)", (2, 1.0)),
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
