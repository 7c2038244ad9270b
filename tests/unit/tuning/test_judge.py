"""Who judges the images of a search, and what is searched and said where nobody does."""

import dataclasses

import pytest

from vivace.benchmark import QualityRequest
from vivace.benchmark.store import Invocation
from vivace.errors import UsageError
from vivace.foundation.spec.limits import DEFAULT_LIMITS, Limits
from vivace.foundation.spec.record import Outcome
from vivace.foundation.stats import Gate
from vivace.models.find import LocatedModel, find_model
from vivace.recipes.resolve import resolve
from vivace.tuning.final.judge import judge_of
from vivace.tuning.search.results import Result, Rung
from vivace.tuning.settings import ImageRequest


@pytest.fixture
def photographic() -> LocatedModel:
    """A model of somebody else, which has no scorer of its own, on a machine without the usual one."""
    located = find_model("tiny-sd")
    return dataclasses.replace(
        located, entry=None, model=located.model.model_copy(update={"source": "folder", "name": "a folder"})
    )


@pytest.mark.parametrize(
    ("scorer", "why"), [("auto", "no CLIP model that judges images"), (None, "--scorer none")]
)
def test_without_a_judge_only_what_keeps_the_image_is_searched(
    photographic: LocatedModel, scorer: str | None, why: str
) -> None:
    judge = judge_of(photographic, QualityRequest(scorer=scorer), DEFAULT_LIMITS)
    assert judge.same_picture_only
    assert judge.compares, "images that should be the same are compared with the baseline's"
    assert judge.limits.clip is None
    assert judge.limits.match == DEFAULT_LIMITS.match
    searched, more = judge.notes("vivace tune sd15 --minutes 8 --scorer none")
    assert searched.startswith(why)
    assert "only techniques that keep the image are searched" in searched
    assert more.endswith("vivace tune sd15 --minutes 8 --scorer openai/clip-vit-large-patch14")
    assert "steps" in more
    own = judge_of(find_model("tiny-sd"), QualityRequest(scorer=None), DEFAULT_LIMITS)
    assert own.notes("vivace tune tiny-sd")[1].endswith("--scorer tiny-clip")


def test_with_a_judge_everything_is_searched_and_nothing_is_to_be_said(photographic: LocatedModel) -> None:
    judge = judge_of(photographic, QualityRequest(scorer="embedded"), DEFAULT_LIMITS)
    assert not judge.same_picture_only
    assert judge.limits == DEFAULT_LIMITS
    assert judge.notes("vivace tune sd15") == []
    assert judge.quality_request(True).scorer == "embedded"
    assert not judge_of(find_model("tiny-sd"), QualityRequest(), DEFAULT_LIMITS).same_picture_only


def test_a_limit_needs_a_judge(photographic: LocatedModel) -> None:
    with pytest.raises(UsageError, match=r"clip=0.97: no CLIP model .* add --scorer NAME"):
        judge_of(photographic, QualityRequest(), Limits(clip=0.97))
    with pytest.raises(UsageError, match="--witness blip: it is a second model beside CLIP; add --scorer"):
        judge_of(photographic, QualityRequest(witness="blip"), DEFAULT_LIMITS)


@pytest.mark.parametrize(
    ("quality", "limits", "flag"),
    [
        (QualityRequest(scorer="embedded"), DEFAULT_LIMITS, "--scorer"),
        (QualityRequest(witness="blip"), DEFAULT_LIMITS, "--witness"),
        (QualityRequest(), Limits(clip=0.97), "--min-quality"),
    ],
)
def test_random_weights_have_no_quality_to_judge(quality: QualityRequest, limits: Limits, flag: str) -> None:
    with pytest.raises(UsageError, match=f"^{flag}: synthetic:sd15 has random weights"):
        judge_of(find_model("synthetic:sd15"), quality, limits)


def test_images_that_show_nothing_are_not_judged() -> None:
    synthetic = judge_of(find_model("synthetic:sd15"), QualityRequest(), DEFAULT_LIMITS)
    assert ImageRequest(controls=("edges.png",)).has_random_controlnet
    assert not ImageRequest(task="control", controlnet="folder").has_random_controlnet
    random = judge_of(find_model("tiny-sd"), QualityRequest(), DEFAULT_LIMITS, shows_nothing=True)
    assert [judging.compares for judging in (synthetic, random)] == [False] * 2
    assert [judging.same_picture_only for judging in (synthetic, random)] == [True] * 2


def test_what_another_judge_said_is_judged_again() -> None:
    judge = judge_of(find_model("tiny-sd"), QualityRequest(), DEFAULT_LIMITS)
    assert judge.scorer is not None
    proven = Result(resolve("steps(8)"), Outcome.MEASURED, Rung.FINAL, 1.0, slack=0.1, gate=Gate.UNCLEAR)
    own = Invocation("", "", (), scorer=judge.scorer.id)
    assert judge.adjust(proven, own) == proven
    again = judge.adjust(proven, Invocation("", "", ()))
    assert again is not None
    assert (again.rung, again.gate, again.slack, again.gain) == (Rung.SCREENED, None, None, 1.0)
