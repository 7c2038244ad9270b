"""Limits of witnesses that were calibrated on this machine."""

from pathlib import Path

import pytest

from vivace.errors import StoreError
from vivace.foundation.spec.limits import (
    DEFAULT_LIMITS,
    WITNESS_LIMIT,
    JudgeKind,
    Limits,
    SeenDamage,
    WitnessCalibration,
)
from vivace.measure.witness_limits import (
    calibrated_limit,
    calibrated_limits,
    file_of,
    keep,
    kept,
    limit_notes,
)

MODEL, CLIP, BLIP = "flux-dev@1", "openai/clip@2", "org/blip@refs/pr/5@3"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path / "cache"))


def calibration(
    scorer: str = CLIP, limit: float | None = 0.93, kind: JudgeKind = "clip"
) -> WitnessCalibration:
    row = SeenDamage(damage="blur", unit="px", strengths=(1.0, 2.0), kept=(0.99, 0.8), seen_from=1.5)
    return WitnessCalibration(
        model=MODEL,
        scorer=scorer,
        kind=kind,
        limit=limit,
        grade=4,
        num_images=39,
        num_prompts=13,
        margin=12.5,
        harmless={"rounding": 0.998},
        damage=(row,),
        faint=("banding",),
        workload={"height": 1024},
        environment={"device": "cuda"},
        made="2026-11-28",
    )


def test_what_is_kept_is_read_again() -> None:
    assert kept(MODEL, CLIP) is None
    file = keep(calibration())
    assert file == file_of(MODEL, CLIP)
    assert kept(MODEL, CLIP) == calibration()
    assert kept("flux-dev@other", CLIP) is None
    assert calibrated_limit(MODEL, CLIP) == 0.93
    assert calibrated_limit("", CLIP) is None


def test_limits_are_the_calibrated_ones_unless_the_user_sets_them() -> None:
    assert calibrated_limits(DEFAULT_LIMITS, MODEL, CLIP) == DEFAULT_LIMITS
    keep(calibration())
    keep(calibration(BLIP, 0.8, "blip"))
    both = calibrated_limits(DEFAULT_LIMITS, MODEL, f"{CLIP} and {BLIP}")
    assert (both.clip, both.witness) == (0.93, 0.8)
    assert both.for_scorer(f"{CLIP} and {BLIP}").clip == 0.93
    assert calibrated_limits(DEFAULT_LIMITS, MODEL, CLIP).witness == WITNESS_LIMIT
    own = calibrated_limits(Limits(clip=0.99, witness=WITNESS_LIMIT), MODEL, f"{CLIP} and {BLIP}")
    assert (own.clip, own.witness) == (0.99, WITNESS_LIMIT)
    assert calibrated_limits(Limits(clip=None), MODEL, CLIP).clip is None
    assert calibrated_limits(DEFAULT_LIMITS, MODEL, None) == DEFAULT_LIMITS


def test_a_note_says_where_a_limit_comes_from() -> None:
    assert limit_notes(MODEL, CLIP, DEFAULT_LIMITS) == [
        "no calibration of openai/clip for photographs: its limit (95 %) comes from drawn shapes; vivace calibrate "
        "witness --model flux-dev --witness clip:openai/clip"
    ]
    (second,) = limit_notes(MODEL, f"{CLIP} and {BLIP}", Limits(clip=0.9))
    assert "no calibration of org/blip@refs/pr/5 for photographs: its limit (90 %)" in second
    assert second.endswith("--witness blip:org/blip@refs/pr/5")
    (unknown,) = limit_notes("", CLIP, DEFAULT_LIMITS)
    assert unknown.endswith("`vivace calibrate witness` chooses one for a model that runs here")
    keep(calibration())
    assert limit_notes(MODEL, CLIP, DEFAULT_LIMITS) == [
        "the limit of openai/clip (93 %) was calibrated on 39 images of flux-dev on 2026-11-28"
    ]
    assert limit_notes("tiny-sd@1", "tiny-clip@2", DEFAULT_LIMITS) == []
    assert limit_notes(MODEL, None, DEFAULT_LIMITS) == []
    assert limit_notes(MODEL, CLIP, Limits(clip=0.9)) == []


def test_a_damaged_file_is_named() -> None:
    keep(calibration()).write_text('{"limit": 2}')
    with pytest.raises(StoreError, match=r"is not a calibration .*delete it"):
        kept(MODEL, CLIP)
