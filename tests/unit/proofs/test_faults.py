"""Planted faults of a server are named; of a good one, nothing is."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.images_server import serving
from vivace.benchmark.load_testing import images_endpoint
from vivace.cli import app
from vivace.errors import Unsupported

REFERENCE = "python:tests.drawn_shapes:draw"
PROMPTS = [
    f"a {first} circle and a {second} square"
    for first in ("red", "blue", "orange")
    for second in ("green", "yellow")
]
SETTINGS = ("--height", "96", "--width", "96", "--steps", "8", "--guidance-scale", "4", "--scorer", "none")


def prove(folder: Path, a: str, b: str, *more: str, prompts: list[str] = PROMPTS, seeds: int = 2) -> Result:
    file = folder / "prompts.txt"
    file.write_text("\n".join(prompts))
    arguments = [
        "prove",
        a,
        b,
        "--prompts",
        str(file),
        "--seeds",
        str(seeds),
        "--store",
        str(folder / "store"),
    ]
    return CliRunner().invoke(app, [*arguments, *SETTINGS, *more], standalone_mode=False)


def answer(result: Result) -> dict:
    assert result.exception is None, result.output
    return json.loads(result.stdout)


def against_server(folder: Path, fault: str, *more: str, seeds: int = 2) -> dict:
    with serving(fault) as server:
        return answer(prove(folder, REFERENCE, server.url, "--format", "json", *more, seeds=seeds))


def failed(proof: dict) -> list[str]:
    return [check["name"] for check in proof["checks"] if check["status"] == "failed"]


def test_a_good_server_is_proven_and_nothing_is_named(tmp_path: Path) -> None:
    proof = against_server(tmp_path, "", "--claim", "same", "--claim", "as-good", "--claim", "honest")
    assert proof["exit_code"] == 0
    assert {name: a["verdict"] for name, a in proof["answers"].items() if name != "fast"} == {
        "same": "proven",
        "as-good": "proven",
        "honest": "proven",
        "legible": "not checked",
    }
    assert not failed(proof)
    assert not proof["findings"]
    assert not proof["failures"]
    assert not proof["notes"]
    assert len(proof["checks"]) > 8
    assert {check["status"] for check in proof["checks"]} == {"passed"}


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("batch changes seed", "n=2 begins with the image of n=1"),
        ("fewer", "n=2 gives two images"),
        ("ignores fields", "an unknown field is refused"),
        ("ignored steps", "the number of steps changes the image"),
        ("ignored size", "the size is what was asked for"),
        ("random", "the same seed twice gives the same image"),
    ],
)
def test_a_dishonest_server_fails_the_check_with_its_request(tmp_path: Path, fault: str, name: str) -> None:
    proof = against_server(tmp_path, fault, seeds=1)
    check = next(check for check in proof["checks"] if check["name"] == name and check["status"] == "failed")
    assert check["request"].startswith("curl http://127.0.0.1:")
    assert proof["answers"]["honest"]["verdict"] == "failed"
    assert proof["exit_code"] == 1


def test_a_blurring_decoder_is_softer_and_worse(tmp_path: Path) -> None:
    proof = against_server(tmp_path, "blurred")
    assert proof["answers"]["as-good"]["verdict"] == "failed"
    assert "softer (sharpness ×" in proof["headline"]
    assert proof["exit_code"] == 1


def test_black_images_are_named(tmp_path: Path) -> None:
    proof = against_server(tmp_path, "black")
    assert proof["answers"]["as-good"]["verdict"] == "failed"
    (finding,) = [f for f in proof["findings"] if f["text"].startswith("black")]
    assert "6 images of B" in finding["text"]
    assert '"seed": 1' in finding["request"]
    assert proof["exit_code"] == 1


def test_an_ignored_seed_is_named(tmp_path: Path) -> None:
    proof = against_server(tmp_path, "ignored seed")
    assert "the seed changes the image" in failed(proof)
    (finding,) = [f for f in proof["findings"] if f["text"].startswith("duplicates")]
    assert "as if the seed is ignored" in finding["text"]
    assert proof["answers"]["same"]["verdict"] == "failed"


def test_a_switched_seed_is_named(tmp_path: Path) -> None:
    proof = against_server(tmp_path, "switched seed")
    assert proof["answers"]["same"]["verdict"] == "failed"
    (finding,) = proof["findings"]
    assert "6 images of B are A's of another seed" in finding["text"]
    assert proof["exit_code"] == 1


def test_a_busy_server_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_endpoint, "FIRST_WAIT_S", 0.01)
    proof = against_server(tmp_path, "busy", "--claim", "same")
    assert proof["exit_code"] == 0
    assert any("HTTP 429" in note for note in proof["notes"])


def test_one_line_for_each_image_that_timed_out_and_the_rest_goes_on(tmp_path: Path) -> None:
    with serving("timeout") as server:
        result = prove(
            tmp_path, REFERENCE, server.url, "--timeout", "0.3", seeds=1, prompts=PROMPTS[1::2] + PROMPTS[::2]
        )
    assert result.exception is None, result.output
    assert result.return_value == 4
    assert " ".join(result.stdout.split()).count("no answer within 0.3 s") == 3
    assert "3 images could not be compared" in result.stdout


def test_images_as_webp_and_as_addresses_are_read_and_noted(tmp_path: Path) -> None:
    proof = against_server(tmp_path, "webp", "--claim", "as-good", seeds=1)
    assert any("WEBP, which may be lossy" in note for note in proof["notes"])
    assert proof["answers"]["as-good"]["verdict"] == "proven"
    assert proof["findings"] == []
    proof = against_server(tmp_path, "url", "--claim", "same", seeds=1)
    assert any("come as addresses (url)" in note for note in proof["notes"])
    assert proof["exit_code"] == 0


@pytest.mark.parametrize(
    ("fault", "reason", "exit_code"),
    [
        ("elsewhere", "another host, from which nothing is fetched", 4),
        ("redirects", "it redirects to http://127.0.0.1:9", 4),
        ("no image", "it is not an image: it begins with b'<html>oops", 1),
    ],
)
def test_what_is_no_answer_is_one_line(tmp_path: Path, fault: str, reason: str, exit_code: int) -> None:
    proof = against_server(tmp_path, fault, seeds=1)
    assert reason in proof["failures"][0]["reason"]
    assert "not asked for, after 5 failures in a row" in proof["failures"][-1]["reason"]
    assert proof["exit_code"] == exit_code
    assert ("an answer of status 200 has the image" in failed(proof)) == (exit_code == 1)


def test_a_server_that_is_not_there_is_said_to_be_before_anything_is_drawn(tmp_path: Path) -> None:
    result = prove(tmp_path, REFERENCE, "http://127.0.0.1:9/v1", seeds=1)
    assert isinstance(result.exception, Unsupported)
    assert "is the server running?" in str(result.exception)
    assert not (tmp_path / "store").exists()


def test_a_server_that_goes_away_is_a_line_for_each_image(tmp_path: Path) -> None:
    result = prove(tmp_path, REFERENCE, "http://127.0.0.1:9/v1?model=x", "--format", "json", seeds=1)
    proof = answer(result)
    assert "is the server running?" in proof["failures"][0]["reason"]
    assert proof["exit_code"] == 4


def test_a_key_is_sent_to_its_side_and_is_in_no_output(tmp_path: Path) -> None:
    key = tmp_path / "key.txt"
    key.write_text("pass-word\n")
    page = tmp_path / "page.html"
    with serving("key") as server:
        refused = answer(prove(tmp_path, REFERENCE, server.url, "--format", "json", seeds=1))
        assert refused["failures"][0]["reason"] == "HTTP 401: no key"
        more = ("--key-b", str(key), "--format", "json", "-o", str(page))
        result = prove(tmp_path, REFERENCE, server.url, *more, seeds=1)
    assert answer(result)["exit_code"] == 0
    kept = "".join(path.read_text() for path in (tmp_path / "store").rglob("*.json*"))
    assert "pass-word" not in result.output + page.read_text() + kept
    assert "Bearer $KEY" in page.read_text()


def test_several_models_ask_for_a_name(tmp_path: Path) -> None:
    with serving("several models") as server:
        result = prove(tmp_path, REFERENCE, server.url)
        assert "?model=NAME, NAME is one of one, two" in str(result.exception)
        assert (
            answer(prove(tmp_path, REFERENCE, f"{server.url}?model=two", "--format", "json"))["exit_code"]
            == 0
        )
        assert {body["model"] for body in server.requests} == {"two"}
