"""Witnesses see what a viewer sees, and call nothing worse that is as good."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter

from tests.drawn_shapes import COLOURS, draw
from vivace.measure.image_metrics import pixels
from vivace.proofs.checks.pair_figures import PairFigures, ReadImage, statistics_of
from vivace.proofs.sides.proof_store import KeptImage
from vivace.proofs.verdicts.as_good import Standing, WitnessResult, as_good, witness_results
from vivace.proofs.verdicts.same import ProofVerdict

PROMPTS = [f"a {first} and a {second} shape" for first in COLOURS for second in COLOURS if first < second][
    :13
]
Change = Callable[[Any], Any]


def image(picture: Any, score: float | None = None) -> ReadImage:
    scores = {} if score is None else {"CLIP": (score, 20.0)}
    return ReadImage(KeptImage(None), picture.size, alone=statistics_of(pixels(picture)), scores=scores)


def results_of(
    change: Change, prompts: list[str] = PROMPTS, seeds: tuple[int, ...] = (0, 1), other_seed: int = 0
) -> dict[str, WitnessResult]:
    pairs = [
        PairFigures(p, s, image(draw(p, s)), image(change(draw(p, s + other_seed))))
        for p in prompts
        for s in seeds
    ]
    return {t.witness: t for t in witness_results(pairs, {})}


def noisy(picture: Any) -> Any:
    random = np.random.default_rng(0)
    values = np.asarray(picture) + random.normal(0, 8, (picture.height, picture.width, 1))
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


@pytest.mark.parametrize(
    ("change", "witness", "word"),
    [
        (lambda p: p.filter(ImageFilter.GaussianBlur(1)), "sharpness", "softer"),
        (lambda p: ImageEnhance.Color(p).enhance(0.5), "saturation", "paler"),
        (lambda p: ImageEnhance.Contrast(p).enhance(0.5), "contrast", "flatter"),
        (lambda p: ImageEnhance.Brightness(p).enhance(0.7), "brightness", "darker"),
        (noisy, "noise", "noisier"),
    ],
)
def test_what_a_viewer_sees_is_named(change: Change, witness: str, word: str) -> None:
    result = results_of(change)[witness]
    assert result.standing is Standing.WORSE
    assert result.word == word
    verdict = as_good([result], is_same_picture=True, is_rounding=False, broken="", shows_something=True)
    assert verdict.verdict is ProofVerdict.FAILED
    assert f"{word} ({witness} " in verdict.reason


def scored(drop: float, spread: float = 0.2, number: int = 13) -> WitnessResult:
    """Return what CLIP says of images that fit their prompts less by a share of the margin of 10 points."""
    random = np.random.default_rng(2)
    plain = draw("red", 0)
    pairs = [
        PairFigures(f"{k}", 0, image(plain, 30.0), image(plain, 30 - 10 * drop + random.normal(0, spread)))
        for k in range(number)
    ]
    return witness_results(pairs, {"CLIP": 0.95})[0]


def test_clip_is_asked_for_a_share_of_its_margin() -> None:
    assert scored(0.0).standing is Standing.SAME
    assert scored(0.2).standing is Standing.WORSE
    assert scored(-0.2).standing is Standing.BETTER
    unclear = scored(0.03, spread=1.5)
    assert unclear.standing is Standing.UNCLEAR
    assert unclear.test.needed is not None
    assert unclear.test.needed > 13


def test_other_pictures_need_a_witness_that_reads_the_prompt() -> None:
    by_witness = list(results_of(lambda p: p).values())
    state = {"is_rounding": False, "broken": "", "shows_something": True}
    assert as_good(by_witness, is_same_picture=True, **state).verdict is ProofVerdict.PROVEN
    alone = as_good(by_witness, is_same_picture=False, **state)
    assert alone.verdict is ProofVerdict.UNCLEAR
    assert "--scorer" in alone.reason
    assert as_good([scored(0.0), *by_witness], is_same_picture=False, **state).verdict is ProofVerdict.PROVEN
    broken = as_good(
        by_witness, is_same_picture=True, **(state | {"broken": "1 image of B is broken (black)"})
    )
    assert broken.verdict is ProofVerdict.FAILED
