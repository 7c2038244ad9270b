"""`vivace.prove` gives the answer of the command, and says what is wrong before anything is drawn."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import vivace
from tests.images_server import serving
from vivace.cli import app
from vivace.errors import Unsupported, UsageError

SHAPES = "python:tests.drawn_shapes:draw"
PROMPTS = [
    "a red shape",
    "a blue shape",
    "a green shape",
    "a purple shape",
    "a yellow shape",
    "an orange shape",
]


def without_times(proof: dict) -> dict:
    proof["speed"] = proof["answers"]["fast"] = None
    for pair in proof["pairs"]:
        pair["a"]["seconds"] = pair["b"]["seconds"] = None
    return proof


def test_it_answers_as_the_command_does(tmp_path: Path) -> None:
    soft = "python:tests.drawn_shapes:draw_soft"
    proof = vivace.prove(
        SHAPES,
        soft,
        prompts=PROMPTS,
        num_seeds=1,
        scorer=None,
        sizes=["96x64", (64, 96)],
        store=tmp_path / "a",
    )
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    arguments = ["prove", SHAPES, soft, "--prompts", str(file), "--seeds", "1", "--scorer", "none"]
    arguments += ["--sizes", "96x64,64x96", "--store", str(tmp_path / "b"), "--format"]
    typed = CliRunner().invoke(app, [*arguments, "json"], standalone_mode=False)
    assert without_times(json.loads(typed.stdout)) == without_times(json.loads(json.dumps(proof.to_dict())))
    assert proof.verdict == "failed"
    assert proof.exit_code == typed.return_value == 1
    lines = CliRunner().invoke(app, [*arguments, "text"]).stdout.partition("Fast?")[0]
    assert lines == str(proof).partition("Fast?")[0]
    page = proof.page()
    assert "softer" in page
    assert "To repeat it" not in page


def test_claims_limits_and_progress(tmp_path: Path) -> None:
    ends = []
    proof = vivace.prove(
        SHAPES,
        SHAPES,
        prompts=PROMPTS,
        num_seeds=1,
        scorer=None,
        claims="same",
        fail_under={"ssim": 0.99},
        store=tmp_path,
        progress=lambda side, done, total: ends.append((side, done, total)),
    )
    assert proof.claims == ("same",)
    assert proof.exit_code == 0
    assert [end[0] for end in ends if end[1] == end[2]] == ["a", "b"]


def test_an_interrupted_call_goes_on(tmp_path: Path) -> None:
    def stop(side: str, done: int, total: int) -> None:
        if side == "b" and done == 3:
            raise KeyboardInterrupt

    with serving() as server:
        call = {"prompts": PROMPTS, "num_seeds": 1, "scorer": None, "store": tmp_path, "claims": "same"}
        with pytest.raises(KeyboardInterrupt):
            vivace.prove(SHAPES, server.url, **call, progress=stop)
        before = len(server.requests)
        assert vivace.prove(SHAPES, server.url, **call).exit_code == 0
        later = [body["prompt"] for body in server.requests[before : before + 6]]
    assert PROMPTS[1] not in later
    assert PROMPTS[4] in later


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
