"""`vivace.prove` gives the answer of the command, and says what is wrong before anything is drawn."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import vivace
from tests.proved import PROMPTS, SHAPES, prove
from vivace.errors import Unsupported, UsageError

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
