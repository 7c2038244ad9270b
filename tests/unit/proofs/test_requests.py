"""Faults of a server that only certain requests show: each fails a check of its own, with the request."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.images_server import serving
from vivace.benchmark.load_testing import images_endpoint
from vivace.cli import app

PROMPTS = [f"a {word} circle" for word in ("red", "blue", "orange", "green", "yellow", "purple")]
SETTINGS = ("--height", "96", "--width", "96", "--steps", "8", "--guidance-scale", "4", "--scorer", "none")
LORA = '?loras=[{"name":"tint"}]'


def against_server(folder: Path, fault: str, fields: str = "", a: str = "draw", seeds: int = 1) -> dict:
    file = folder / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    with serving(fault) as server:
        sides = [f"python:tests.drawn_shapes:{a}", server.url + fields]
        more = [
            "--prompts",
            str(file),
            "--seeds",
            str(seeds),
            "--store",
            str(folder / "store"),
            "--format",
            "json",
        ]
        result = CliRunner().invoke(app, ["prove", *sides, *more, *SETTINGS], standalone_mode=False)
    assert result.exception is None, result.output
    return json.loads(result.stdout)


def failed(proof: dict) -> dict[str, str]:
    return {check["name"]: check["reason"] for check in proof["checks"] if check["status"] == "failed"}


@pytest.mark.parametrize(
    ("fault", "name", "reason"),
    [
        ("seeds of 31 bits", "a seed above 2^31 changes the image", "0 and 2147483648 give the same image"),
        ("at most 2^31 - 1", "a seed above 2^31 changes the image", "and 2147483649 give the same image"),
        ("cut prompts", "the end of a long prompt changes the image", "red and blue give the same image"),
        ("20 words", "the end of a long prompt changes the image", "red and blue give the same image"),
        ("quotes stripped", "a pair of quotes around the prompt changes the image", "it draws A's image"),
        ("ASCII alone", "words of other scripts change the image", "it draws A's image"),
        (
            "guidance of at most 5",
            "the guidance changes the image",
            "of 4 it draws A's image, of 6 another one",
        ),
        ("batches of two", "n=4 gives four images", "image 3 is the same as one before it"),
        ("says another size", "the answer says what is in it", "it says size 512x512, the image has 96x96"),
        ("confused by many", "requests at once give each its own image", "another image than alone"),
        ("resized", "the size is what was asked for", "the image of 96x96, resized or cut"),
        ("ignored negative prompt", "a negative prompt changes the image, or is refused", "changes nothing"),
        ("confused by load", "requests at once give each its own image", "another image than alone"),
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
def test_a_fault_fails_its_own_check_alone(tmp_path: Path, fault: str, name: str, reason: str) -> None:
    proof = against_server(tmp_path, fault)
    assert list(failed(proof)) == [name]
    assert reason in failed(proof)[name]
    assert proof["exit_code"] == 1


def test_fewer_steps_than_asked_for_are_named(tmp_path: Path) -> None:
    proof = against_server(tmp_path, "half the steps")
    assert "it draws A's image of 4 steps" in str(failed(proof)) + str(proof["findings"]).replace(
        "B draws", "it draws"
    )


def test_half_the_guidance_is_named(tmp_path: Path) -> None:
    findings = against_server(tmp_path, "half the guidance")["findings"]
    assert findings[0]["text"].startswith("instead: B draws A's image of guidance 2")


@pytest.mark.parametrize("fault", ["one image a request", "one at a time"])
def test_what_a_server_refuses_is_not_held_against_it(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images_endpoint, "FIRST_WAIT_S", 0.1)
    proof = against_server(tmp_path, fault)
    assert failed(proof) == {}
    assert proof["exit_code"] == 0


def test_a_lora_that_works_fails_nothing(tmp_path: Path) -> None:
    proof = against_server(tmp_path, "LoRA", LORA, "draw_with_lora")
    assert failed(proof) == {}
    assert proof["exit_code"] == 0
    assert any(check["name"].startswith("loras changes the image") for check in proof["checks"])


@pytest.mark.parametrize(
    ("fault", "name", "reason"),
    [
        ("LoRA ignored", "loras changes the image of its own request alone", "it is ignored, or stays on"),
        ("LoRA stays on", "loras changes the image of its own request alone", "it is ignored, or stays on"),
        ("LoRA at half strength", "loras works at the strength that is asked for", "half the strength"),
    ],
)
def test_a_lora_that_does_not_is_named(tmp_path: Path, fault: str, name: str, reason: str) -> None:
    proof = against_server(tmp_path, fault, LORA, "draw_with_lora")
    assert reason in failed(proof)[name]
    assert proof["exit_code"] == 1


def test_a_few_images_of_another_model_are_named_with_how_often(tmp_path: Path) -> None:
    (finding,) = against_server(tmp_path, "every fourth of another model")["findings"]
    assert finding["text"].startswith("mixed: 1 of B's 6 images is another one, all others are A's own")


@pytest.mark.parametrize(
    ("fault", "seeds", "words"),
    [
        ("holes", 2, "hole: 3 images of B with a patch of one colour, which is not A's"),
        ("degrades", 4, "drift: B's images get further from A's the later they are drawn"),
        ("blurred at times", 2, "mixed: 3 of B's 12 images are other ones, one in 4, all others are A's own"),
    ],
)
def test_faults_of_some_images_are_named(tmp_path: Path, fault: str, seeds: int, words: str) -> None:
    proof = against_server(tmp_path, fault, seeds=seeds)
    assert any(finding["text"].startswith(words) for finding in proof["findings"]), proof["findings"]
    assert proof["exit_code"] == 1


def test_what_is_wrong_at_times_is_not_blamed_on_a_setting(tmp_path: Path) -> None:
    names = failed(against_server(tmp_path, "blurred at times", seeds=2))
    assert "a request gives the same image each time" in names
    assert "the guidance changes the image" not in names
