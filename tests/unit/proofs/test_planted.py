"""Planted faults: the verdict is right, and no cause is named that is not the fault."""

import pytest

import tests.planted as planted
from vivace import prove
from vivace.proofs.proof import Proof

PROMPTS = [
    f"a {first} circle and a {second} square"
    for first in ("red", "blue", "orange", "purple")
    for second in ("green", "yellow")
]
SETTINGS = {"height": 96, "width": 96, "num_inference_steps": 12, "guidance_scale": 4.0}
_UNTRUE = ("instead", "guidance", "step", "seam", "JPEG", "WebP", "watermark", "softened", "moved", "size")


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
        ("other_guidance", "proven", "proven", ""),
        ("lora_ignored", "failed", "cannot tell", "cannot say why"),
        ("strong_latents", "proven", "proven", ""),
        ("smaller", "proven", "proven", ""),
        ("webp", "proven", "proven", ""),
        ("jpeg", "proven", "proven", ""),
        ("seams", "proven", "proven", ""),
        ("colours_moved", "proven", "proven", ""),
        ("swapped_colours", "failed", "cannot tell", "cannot say why"),
        ("softened", "proven", "failed", ""),
        ("other_vae", "proven", "proven", ""),
        ("wrong_seeds", "failed", "cannot tell", "cannot say why"),
        ("neighbours_seed", "failed", "cannot tell", "switched: 4 images of B are A's of another seed"),
        ("old_buffer", "failed", "cannot tell", "switched: 4 images of B are A's of another prompt"),
        ("mixed_batch", "failed", "cannot tell", "switched: 4 images of B are A's of another prompt"),
        ("black_squares", "failed", "failed", "hole: 4 images of B with a patch of one colour"),
    ],
)
def test_no_cause_is_named_that_is_not_the_fault(
    tmp_path: object, fault: str, same: str, good: str, why: str
) -> None:
    proof = proof_of(fault, str(tmp_path))
    assert (proof.same.verdict.value, proof.good.verdict.value) == (same, good), proof.headline
    assert proof.why.startswith(why) if why else not proof.why
    assert not any(word in finding.text for finding in proof.findings for word in _UNTRUE)
