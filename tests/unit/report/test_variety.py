"""The gate on images that differ too little from each other."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.make import make_record, make_round
from vivace.foundation.spec.figures import ImageFigures, QualityPass, packed, unpacked
from vivace.foundation.spec.limits import Limits
from vivace.foundation.spec.record import ImageRecord, Outcome, Record
from vivace.foundation.stats import Gate
from vivace.report.quality_gate import Judgement
from vivace.report.rows import rows_of

SCORER = "clip@1"
SEEDS, PROMPTS = 3, 12
Thumbnails = np.ndarray  # (seeds, prompts, 16 * 16 * 3)


def varied(seed: int = 0) -> Thumbnails:
    """Thumbnails of flat backgrounds with an object, all of their own."""
    random = np.random.default_rng(seed)
    images = np.repeat(random.uniform(0, 255, (SEEDS, PROMPTS, 1, 3)), 256, axis=2)
    for s in range(SEEDS):
        for p in range(PROMPTS):
            start = random.integers(0, 200)
            images[s, p, start : start + 50] = random.uniform(0, 255, 3)
    return images.reshape(SEEDS, PROMPTS, -1)


def record_of(recipe: str, seeds: int = SEEDS) -> Record:
    pictures = tuple(
        ImageRecord(index=s * PROMPTS + p, prompt=f"prompt {p}", seed=s, sha256=f"{recipe}-{s}-{p}")
        for s in range(seeds)
        for p in range(PROMPTS)
    )
    rounds = [make_round(i, (1.0, 1.01, 0.99)).model_copy(update={"pictures": pictures}) for i in range(2)]
    return make_record(recipe, *rounds)


def judgement_of(
    images: Thumbnails,
    *,
    baseline: Thumbnails | None = None,
    seeds: int = SEEDS,
    limits: Limits | None = None,
    kept: float = 1.0,
    recipe: str = "steps(8)",
    stored: bool = True,
) -> Judgement:
    base, other = record_of("baseline", seeds), record_of(recipe, seeds)
    of_baseline = varied() if baseline is None else baseline
    rows = []
    for record, thumbnails in ((base, of_baseline), (other, images)):
        for picture in record.rounds[0].pictures:
            s, p = picture.seed, picture.index % PROMPTS
            is_own = record is base
            alone = {"clip_score": 30.0, "clip_score_of_others": 10.0}
            rows.append(
                ImageFigures(
                    sha256=picture.sha256,
                    reference=f"baseline-{s}-{p}",
                    prompt=picture.prompt,
                    scorer=SCORER,
                    alone=alone if is_own else {"clip_score": 10 + 20 * kept},
                    against={} if is_own else {"psnr_db": 12.0, "ssim": 0.5, "match": 0.95},
                    thumbnail=packed(thumbnails[s, p]) if stored else None,
                )
            )
    row = rows_of([base, other], QualityPass({f.key: f for f in rows}, SCORER), limits or Limits(clip=0.9))[1]
    assert row.judgement is not None
    failed = row.judgement.gate is Gate.FAILED
    assert (row.outcome is Outcome.FAILED_QUALITY) is failed
    return row.judgement


def copies(of: Thumbnails) -> Thumbnails:
    return np.repeat(of[:1], SEEDS, axis=0)


def some(of: Thumbnails, prompts: slice) -> Thumbnails:
    made = of.copy()
    made[:, prompts] = copies(of)[:, prompts]
    return made


def two_modes(of: Thumbnails) -> Thumbnails:
    return np.concatenate([of[:2], of[:1]])


COLLAPSES: dict[str, Callable[[Thumbnails], Thumbnails]] = {
    "one image": copies,
    "with noise": lambda of: copies(of) + np.random.default_rng(1).normal(0, 1, of.shape),
    "darker and brighter": lambda of: copies(of) * np.array([0.95, 1, 1.05])[:, None, None],
    "two modes": two_modes,
    "half of the prompts": lambda of: some(of, slice(0, None, 2)),
    "one prompt": lambda of: some(of, slice(3, 4)),
    "half way": lambda of: (of + copies(of)) / 2,
    "one image for all prompts": lambda of: np.repeat(of[:, :1], PROMPTS, axis=1),
    "three images for all prompts": lambda of: of[:, np.arange(PROMPTS) % 3],
}


@pytest.mark.parametrize("name", COLLAPSES)
@pytest.mark.parametrize("seed", [0, 7], ids=["the baseline's", "others"])
def test_images_that_differ_less_than_the_baselines_fail(name: str, seed: int) -> None:
    judgement = judgement_of(COLLAPSES[name](varied(seed)))
    assert (judgement.gate, judgement.figure) == (Gate.FAILED, "variety")


def test_images_that_are_others_but_differ_as_much_pass() -> None:
    for seed in range(1, 9):
        judgement = judgement_of(varied(seed))
        assert judgement.gate is Gate.PASSED
        assert "differences between seeds" in judgement.reason


def test_the_limit_can_be_set_and_switched_off() -> None:
    half_way = COLLAPSES["half way"](varied())
    assert judgement_of(half_way, limits=Limits(clip=0.9, variety=None)).gate is Gate.PASSED
    assert judgement_of(half_way, limits=Limits(clip=0.9, variety=0.3)).gate is Gate.PASSED
    judgement = judgement_of(copies(varied()), limits=Limits(clip=0.9))
    assert judgement.reason.startswith(
        'all seeds of "prompt 0" and 11 more give nearly the same image, and the baseline\'s do not'
    )


def test_a_baseline_whose_seeds_do_not_differ_asks_for_nothing() -> None:
    same = copies(varied())
    assert judgement_of(same, baseline=same).gate is Gate.PASSED


def test_with_one_seed_prompts_are_compared_and_the_rest_is_said_to_be_unknown() -> None:
    judgement = judgement_of(varied(3), seeds=1)
    assert judgement.gate is Gate.PASSED
    assert "with one seed a prompt nothing tells whether seeds differ" in judgement.reason
    one_image = COLLAPSES["one image for all prompts"](varied())
    assert judgement_of(one_image, seeds=1).gate is Gate.FAILED


def test_figures_of_an_older_version_are_judged_as_before_and_say_so() -> None:
    judgement = judgement_of(copies(varied()), stored=False)
    assert judgement.gate is Gate.PASSED
    assert "was not compared, by an older vivace; the same `vivace bench` again adds it" in judgement.reason


def test_variety_alone_passes_nothing() -> None:
    assert judgement_of(varied(2), kept=0.3).gate is Gate.FAILED
    assert judgement_of(varied(2), limits=Limits(clip=None)).gate is Gate.UNCLEAR
    assert judgement_of(copies(varied(2)), limits=Limits(clip=None)).gate is Gate.FAILED


def test_numbers_survive_being_text() -> None:
    values: Sequence[float] = [0.0, 255.0, 127.5, -1.0]
    assert list(unpacked(packed(values))) == values


@pytest.mark.parametrize(
    "name", ["one image", "with noise", "two modes", "half way", "one image for all prompts"]
)
def test_recipes_that_keep_the_picture_are_held_to_variety_too(name: str) -> None:
    collapsed = judgement_of(COLLAPSES[name](varied()), recipe="bf16")
    assert collapsed.gate is Gate.FAILED
    assert "differences" in collapsed.reason or "nearly the same image" in collapsed.reason
    rounded = varied() + np.random.default_rng(2).normal(0, 0.5, varied().shape)
    assert judgement_of(rounded, recipe="bf16").gate is Gate.PASSED
