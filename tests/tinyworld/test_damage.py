"""Damage that no limit was chosen for: the gate passes none of it, and nothing that loses nothing fails."""

import functools
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from PIL import Image

from tinyworld import captions, damage, scenes, verifier
from tinyworld.damaged import details, places
from tinyworld.damaged.pictures import Pictures
from vivace.foundation.spec.figures import ImageFigures
from vivace.foundation.spec.limits import Limits
from vivace.foundation.stats import Gate
from vivace.measure.image_metrics import aligned, match, pixels
from vivace.measure.scorer import ClipScorer
from vivace.models.scorers import find_scorer
from vivace.report.fidelity import Fidelity, PairedFigures, fidelity
from vivace.report.quality_gate import judge_figures

SEEDS = 2
RUINED = (
    "gray", "hue 120 degrees", "red and blue exchanged", "left and right exchanged", "shift by 32 pixels",
    "blur of 6 pixels", "the smaller object gone", "one prompt of thirteen", "half of the images of other prompts",
)  # fmt: skip
GOOD = (
    "shift by 1 pixel",
    "shift by 1 pixel up and left",
    "JPEG 90",
    "blur of 0.5 pixels",
    "noise of 3 levels",
)
NAMED: dict[str, Callable[[Pictures, Sequence[str]], Pictures]] = {
    name: change for kind in damage.IMAGE.values() for name, change in kind.items()
}


class Judge:
    """The gate on changes of true scenes, thirteen prompts at two seeds (which differ by noise only)."""

    def __init__(self) -> None:
        labels = scenes.sample(13, 4, "held_out")
        words = random.Random(4)
        full = captions.describe(labels)
        self.prompts = [captions.write(scene, words, terse=0.0, noise=0.0) for scene in full] * SEEDS
        drawn = scenes.to_uint8(scenes.draw(labels)[0]).numpy()
        self.pictures = np.concatenate([drawn, details.noisy(drawn, 1)])
        scorer = find_scorer("tiny-clip")
        self.clip, self.limits = ClipScorer(scorer.folder), Limits().for_scorer(scorer.id)
        self.read = self.clip.embed_prompts(self.prompts)
        self.references = [
            self.figures(k, picture, embedding, {})
            for k, (picture, embedding) in enumerate(self.embedded(self.pictures))
        ]

    def embedded(self, pictures: Pictures) -> list[tuple[Pictures, np.ndarray]]:
        vectors = self.clip.embed_images([Image.fromarray(np.ascontiguousarray(p)) for p in pictures])
        return list(zip(pictures, vectors, strict=True))

    def figures(
        self, k: int, picture: Pictures, embedding: np.ndarray, against: dict[str, float]
    ) -> ImageFigures:
        scores = 100 * self.read @ embedding
        others = [float(score) for score, p in zip(scores, self.prompts, strict=True) if p != self.prompts[k]]
        alone = {"clip_score": float(scores[k]), "clip_score_of_others": float(np.mean(others))}
        sha = f"{'b' if against else 'a'}/{k}"
        return ImageFigures(
            sha256=sha, reference=f"a/{k}", prompt=self.prompts[k], alone=alone, against=against
        )

    def verdict(self, name: str, *, same_picture: bool) -> tuple[Gate, str]:
        judgement = judge_figures(self.fidelity(name), None, self.limits, same_picture=same_picture)
        return judgement.gate, judgement.reason

    @functools.cache  # noqa: B019 (the judge lives as long as the tests)
    def fidelity(self, name: str) -> Fidelity:
        changed = NAMED[name](self.pictures, self.prompts)
        pairs = [(pixels(a), pixels(b)) for a, b in zip(changed, self.pictures, strict=True)]
        near = np.stack([aligned(*pair) for pair in pairs]).astype(np.uint8)
        rows = [
            self.figures(k, picture, embedding, {"match": match(*pairs[k])})
            for k, (picture, embedding) in enumerate(self.embedded(near))
        ]
        fidelity_of_pairs = fidelity(PairedFigures(tuple(rows), tuple(self.references)))
        assert fidelity_of_pairs is not None
        return fidelity_of_pairs


@pytest.fixture(scope="module")
def judge() -> Judge:
    torch.set_num_threads(1)
    return Judge()


@pytest.mark.parametrize("name", RUINED)
@pytest.mark.quick("the smaller object gone")
@pytest.mark.exhaustive("hue*", "left*", "red and blue*", "half*", "shift*")
def test_what_is_ruined_fails_as_the_same_picture(judge: Judge, name: str) -> None:
    gate, reason = judge.verdict(name, same_picture=True)
    assert gate is Gate.FAILED, reason


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.quick("JPEG 90")
@pytest.mark.exhaustive("blur*", "noise*", "shift by 1 pixel up*")
def test_what_loses_nothing_does_not_fail(judge: Judge, name: str) -> None:
    gate, reason = judge.verdict(name, same_picture=True)
    assert gate is (Gate.UNCLEAR if name == "JPEG 90" else Gate.PASSED), reason
    if name == "JPEG 90":
        assert reason.startswith("CLIP margin kept 99.3 %, single images capped [98."), "a little is lost"


@pytest.mark.long
@pytest.mark.parametrize("name", NAMED)
def test_no_damage_passes_as_another_picture(judge: Judge, name: str) -> None:
    changed = NAMED[name](judge.pictures, judge.prompts)
    right = [
        verifier.verify(np.ascontiguousarray(picture), prompt).right
        for picture, prompt in zip(changed, judge.prompts, strict=True)
    ]
    if sum(right) < 0.9 * len(right):
        for same_picture in (True, False):
            gate, reason = judge.verdict(name, same_picture=same_picture)
            assert gate is not Gate.PASSED, reason


def test_a_shift_is_undone_and_nothing_else_is(judge: Judge) -> None:
    picture = pixels(judge.pictures[0])
    shifted = pixels(places.shifted(judge.pictures[:1], 1, -2)[0])
    assert match(shifted, picture) == pytest.approx(1)
    assert np.array_equal(aligned(shifted, picture)[4:-4, 4:-4], picture[4:-4, 4:-4])
    assert aligned(picture, picture) is picture
    other = pixels(judge.pictures[1])
    assert aligned(other, picture) is other
    assert match(other, picture) < 0.5
    assert match(pixels(places.shifted(judge.pictures[:1], 5)[0]), picture) < 0.9


def test_the_same_damage_is_done_to_all(judge: Judge) -> None:
    for name, change in NAMED.items():
        changed = change(judge.pictures, judge.prompts)
        assert changed.shape == judge.pictures.shape, name
        assert changed.dtype == np.uint8
        assert (changed != judge.pictures).any(), name
        assert np.array_equal(changed, change(judge.pictures, judge.prompts)), name
