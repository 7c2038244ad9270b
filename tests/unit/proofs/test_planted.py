"""Planted faults: the verdict is right, and no cause is named that is not the fault."""

import pytest

import tests.planted as planted
from vivace import prove
from vivace.proofs.verdicts.proof import Proof

PROMPTS = [
    f"a {first} circle and a {second} square"
    for first in ("red", "blue", "orange", "purple")
    for second in ("green", "yellow")
]
SETTINGS = {"height": 96, "width": 96, "num_inference_steps": 12, "guidance_scale": 4.0}


def proof_of(fault: str, store: str) -> Proof:
    planted.forget()
    sides = ("python:tests.drawn_shapes:draw", f"python:tests.planted:{fault}")
    return prove(
        *sides, prompts=PROMPTS, num_seeds=2, scorer=None, claims=("same", "as-good"), store=store, **SETTINGS
    )


@pytest.mark.parametrize(
    ("fault", "same", "good", "why"),
    [
        ("fewer_steps", "proven", "proven", ""),
        ("half_the_steps", "proven", "proven", "A's of 6 steps"),
        ("other_guidance", "proven", "proven", ""),
        ("smaller", "proven", "failed", ""),
        ("webp", "proven", "proven", ""),
        ("swapped_colours", "failed", "cannot tell", "cannot say why"),
        ("softened", "proven", "failed", ""),
        ("wrong_seeds", "failed", "cannot tell", "cannot say why"),
        ("neighbours_seed", "failed", "cannot tell", "4 images of B are A's of another seed"),
        ("old_buffer", "failed", "cannot tell", "4 images of B are A's of another prompt"),
        ("black_squares", "failed", "failed", "hole: 4 images of B"),
    ],
)
def test_the_verdict_is_right_and_no_cause_is_named_that_is_not_the_fault(
    tmp_path: object, fault: str, same: str, good: str, why: str
) -> None:
    proof = proof_of(fault, str(tmp_path))
    assert (proof.same.verdict.value, proof.good.verdict.value) == (same, good), proof.headline
    assert why in proof.why
    named = " ".join(finding.text for finding in proof.findings)
    if fault == "fewer_steps":
        assert "A's of 8 steps" in named
    elif why in ("", "cannot say why"):
        assert not named


def test_the_worst_pairs_and_no_cause_are_in_every_answer(tmp_path: object) -> None:
    proof = proof_of("wrong_seeds", str(tmp_path))
    assert proof.headline.startswith("B differs from A: cannot say why")
    worst = proof.to_dict()["worst"]
    assert [pair["match"] for pair in worst] == sorted(pair["match"] for pair in worst)
    for text in (str(proof), proof.page()):
        assert "cannot say why" in text
        assert worst[0]["prompt"] in text


def test_one_image_of_another_seed_is_enough(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted, "OFTEN", 13)
    proof = proof_of("wrong_seeds", str(tmp_path))
    assert proof.same.verdict.value == "failed"
    assert "1 another image" in proof.same.reason
    assert f"“{PROMPTS[4]}” seed 1" in proof.same.reason
