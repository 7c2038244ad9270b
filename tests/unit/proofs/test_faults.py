"""Planted faults of a server change the verdict; a good server has none."""

from pathlib import Path

import pytest

from tests.images_server import serving
from tests.proved import PROMPTS, SETTINGS, SHAPES, against_server, answer, failed, proof_of, prove
from vivace.benchmark.load_testing import images_endpoint
from vivace.errors import Unsupported

LORA = '?loras=[{"name":"tint"}]'


def verdicts(proof: dict) -> tuple[str, str, str]:
    """Return whether B's images are the same, as good, and as asked for."""
    same, good, honest = (
        proof["answers"][claim]["verdict"].replace("cannot tell", "?")
        for claim in ("same", "as-good", "honest")
    )
    return same, good, honest


def test_a_good_server_is_proven(tmp_path: Path) -> None:
    more = ("--claim", "same", "--claim", "as-good", "--claim", "honest")
    proof = against_server(tmp_path, "", *more, seeds=2)
    assert proof["exit_code"] == 0
    assert verdicts(proof) == ("proven", "proven", "proven")
    assert not proof["findings"]
    assert not proof["failures"]
    assert not proof["notes"]
    assert len(proof["checks"]) > 8
    assert {check["status"] for check in proof["checks"]} == {"passed"}


@pytest.mark.parametrize(
    ("fault", "seeds", "expected"),
    [
        ("blurred", 1, ("proven", "failed", "proven")),
        ("black", 2, ("failed", "failed", "failed")),
        ("holes", 2, ("failed", "failed", "failed")),
        ("degrades", 4, ("proven", "failed", "failed")),
        ("ignored seed", 2, ("failed", "?", "failed")),
        ("switched seed", 2, ("failed", "?", "failed")),
        ("half the steps", 1, ("proven", "proven", "failed")),
        ("half the guidance", 1, ("proven", "proven", "failed")),
        ("blurred at times", 2, ("proven", "?", "failed")),
        ("every fourth of another model", 1, ("failed", "?", "failed")),
    ],
)
@pytest.mark.quick("blurred-1*", "black*", "half the steps*", "switched*")
def test_a_fault_changes_the_verdict(
    tmp_path: Path, fault: str, seeds: int, expected: tuple[str, str, str]
) -> None:
    proof = against_server(tmp_path, fault, seeds=seeds)
    assert verdicts(proof) == expected
    assert proof["exit_code"] == 1


def test_what_b_drew_instead_is_named_with_the_request(tmp_path: Path) -> None:
    (finding,) = against_server(tmp_path, "half the guidance")["findings"]
    assert "A's of guidance 2" in finding["text"]
    assert finding["request"].startswith("curl http://127.0.0.1:")


@pytest.mark.parametrize(
    ("fault", "name", "reason"),
    [
        ("batch changes seed", "n=2 begins with the image of n=1", "another image than alone"),
        ("fewer", "n=2 gives two images", "got 1"),
        ("batches of two", "n=4 gives four images", "image 3 is the same as one before it"),
        ("ignores fields", "an unknown field is refused", "ignored"),
        ("ignored steps", "the number of steps changes the image", "8 and 7 give the same image"),
        ("ignored size", "the size is what was asked for", "got 96x96"),
        ("resized", "the size is what was asked for", "the image of 96x96, resized or cut"),
        ("random", "the same seed twice gives the same image", "another image"),
        ("seeds of 31 bits", "a seed above 2^31 changes the image", "0 and 2147483648 give the same image"),
        ("at most 2^31 - 1", "a seed above 2^31 changes the image", "and 2147483649 give the same image"),
        ("cut prompts", "the end of a long prompt changes the image", "red and blue give the same image"),
        ("20 words", "the end of a long prompt changes the image", "red and blue give the same image"),
        ("quotes stripped", "a pair of quotes around the prompt changes the image", "it draws A's image"),
        ("ASCII alone", "words of other scripts change the image", "it draws A's image"),
        ("guidance of at most 5", "the guidance changes the image", "of 4 it draws A's image, of 6 another"),
        ("says another size", "the answer says what is in it", "it says size 512x512, the image has 96x96"),
        ("ignored negative prompt", "a negative prompt changes the image, or is refused", "changes nothing"),
        ("confused by load", "requests at once give each its own image", "another image than alone"),
        ("confused by many", "requests at once give each its own image", "another image than alone"),
        (
            "spoiled by a cancelled request",
            "a cancelled request does not spoil the next one",
            "the next one gets another image",
        ),
    ],
)
@pytest.mark.quick(
    "cut prompts*", "batches of two*", "says another size*", "ignored negative*", "confused by many*"
)
def test_a_dishonest_server_fails_its_own_check(tmp_path: Path, fault: str, name: str, reason: str) -> None:
    proof = against_server(tmp_path, fault)
    assert reason in failed(proof)[name]
    if fault not in ("fewer", "ignores fields", "random", "batch changes seed", "ignored size"):
        assert list(failed(proof)) == [name], "and no other"
    check = next(check for check in proof["checks"] if check["status"] == "failed")
    assert "curl http://127.0.0.1:" in check["request"]
    assert verdicts(proof)[2] == "failed"
    assert proof["exit_code"] == 1


@pytest.mark.parametrize("fault", ["one image a request", "one at a time"])
def test_what_a_server_refuses_is_not_held_against_it(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images_endpoint, "FIRST_WAIT_S", 0.1)
    proof = against_server(tmp_path, fault)
    assert failed(proof) == {}
    assert proof["exit_code"] == 0


@pytest.mark.parametrize(
    ("fault", "name", "reason"),
    [
        ("LoRA", "", ""),
        ("LoRA ignored", "loras changes the image of its own request alone", "it is ignored, or stays on"),
        ("LoRA stays on", "loras changes the image of its own request alone", "it is ignored, or stays on"),
        ("LoRA at half strength", "loras works at the strength that is asked for", "half the strength"),
    ],
)
def test_a_lora_works_for_its_own_request_alone(tmp_path: Path, fault: str, name: str, reason: str) -> None:
    a = "python:tests.drawn_shapes:draw_with_lora"
    proof = against_server(tmp_path, fault, a=a, fields=LORA)
    assert any(check["name"].startswith("loras changes the image") for check in proof["checks"])
    assert reason in failed(proof).get(name, "")
    assert proof["exit_code"] == (1 if name else 0)


def test_what_is_wrong_at_times_is_not_blamed_on_a_setting(tmp_path: Path) -> None:
    names = failed(against_server(tmp_path, "blurred at times", seeds=2))
    assert "a request gives the same image each time" in names
    assert "the guidance changes the image" not in names


def test_a_busy_server_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_endpoint, "FIRST_WAIT_S", 0.01)
    proof = against_server(tmp_path, "busy", "--claim", "same")
    assert proof["exit_code"] == 0
    assert any("HTTP 429" in note for note in proof["notes"])


def test_one_line_for_each_image_that_timed_out_and_the_rest_goes_on(tmp_path: Path) -> None:
    prompts = [*PROMPTS[:2], PROMPTS[2], *PROMPTS[3:], "a green and a red shape"]
    with serving("timeout") as server:
        result = prove(tmp_path, SHAPES, server.url, *SETTINGS, "--timeout", "0.3", prompts=prompts)
    assert result.exception is None, result.output
    assert result.return_value == 4
    assert " ".join(result.stdout.split()).count("no answer within 0.3 s") == 2
    assert "2 images could not be compared" in result.stdout


def test_images_as_webp_and_as_addresses_are_read_and_noted(tmp_path: Path) -> None:
    proof = against_server(tmp_path, "webp", "--claim", "as-good")
    assert any("WEBP, which may be lossy" in note for note in proof["notes"])
    assert verdicts(proof)[1] == "proven"
    proof = against_server(tmp_path, "url", "--claim", "same")
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
    proof = against_server(tmp_path, fault)
    assert reason in proof["failures"][0]["reason"]
    assert "not asked for, after 5 failures in a row" in proof["failures"][-1]["reason"]
    assert proof["exit_code"] == exit_code
    assert ("an answer of status 200 has the image" in failed(proof)) == (exit_code == 1)


def test_a_server_that_is_not_there_is_said_to_be_before_anything_is_drawn(tmp_path: Path) -> None:
    result = prove(tmp_path, SHAPES, "http://127.0.0.1:9/v1")
    assert isinstance(result.exception, Unsupported)
    assert "is the server running?" in str(result.exception)
    assert not (tmp_path / "store").exists()
    gone = proof_of(tmp_path, SHAPES, "http://127.0.0.1:9/v1?model=x")
    assert "is the server running?" in gone["failures"][0]["reason"]
    assert gone["exit_code"] == 4


def test_a_key_is_sent_to_its_side_and_is_in_no_output(tmp_path: Path) -> None:
    key, page = tmp_path / "key.txt", tmp_path / "page.html"
    key.write_text("pass-word\n")
    with serving("key") as server:
        refused = proof_of(tmp_path, SHAPES, server.url, *SETTINGS)
        assert refused["failures"][0]["reason"] == "HTTP 401: no key"
        more = (*SETTINGS, "--key-b", str(key), "--format", "json", "-o", str(page))
        result = prove(tmp_path, SHAPES, server.url, *more)
    assert answer(result)["exit_code"] == 0
    kept = "".join(path.read_text() for path in (tmp_path / "store").rglob("*.json*"))
    assert "pass-word" not in result.output + page.read_text() + kept
    assert "Bearer $KEY" in page.read_text()


def test_several_models_ask_for_a_name(tmp_path: Path) -> None:
    with serving("several models") as server:
        result = prove(tmp_path, SHAPES, server.url)
        assert "?model=NAME, one of one, two" in str(result.exception)
        proof = proof_of(tmp_path, SHAPES, f"{server.url}?model=two", *SETTINGS)
        assert proof["exit_code"] == 0
        assert {body["model"] for body in server.requests} == {"two"}
