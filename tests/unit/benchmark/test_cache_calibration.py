"""Calibration finds the most aggressive step cache that passes the quality gate."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.typed import typed
from vivace.architectures import CATALOGUE
from vivace.benchmark import cache_calibration
from vivace.benchmark.cache_calibration import (
    CACHES,
    CacheSearch,
    SettingTrial,
    calibrate_caches,
    settings,
)
from vivace.errors import Unsupported, UsageError
from vivace.foundation.spec.record import Outcome
from vivace.models.prompts import PROMPT_SETS
from vivace.recipes.resolve import resolve
from vivace.techniques import TECHNIQUES


def tried_up_to(limit: float, hits_from: float = 0.0, outcome: str = Outcome.MEASURED) -> Any:
    """Return a fake measurement: images pass up to `limit`, and the cache hits from `hits_from` on."""

    def measure(recipe: str, setting: float) -> SettingTrial:
        resolve(recipe)
        if outcome != Outcome.MEASURED:
            return SettingTrial(recipe, setting, False, outcome, "with a reason")
        if setting < hits_from:
            return SettingTrial(recipe, setting, False, Outcome.NO_EFFECT, "the cache never hit")
        return SettingTrial(recipe, setting, setting <= limit, Outcome.MEASURED, None, setting, 1 + setting)

    return measure


def test_every_step_cache_can_be_calibrated_but_that_of_edits() -> None:
    caches = {name for name, t in TECHNIQUES.items() if t.declared.owns == "step cache"}
    assert set(CACHES) == caches - {"reference_cache"}
    assert {"first_block_cache", "deepcache", "teacache"} <= set(CACHES)
    for name in CACHES:
        knob, low, high = settings(name)
        assert 0 < low < high
        for value in (low, high):
            resolve(f"{name}({knob}={value:g})")
    assert settings("first_block_cache") == ("threshold", 0.0125, 1.2)
    assert settings("deepcache") == ("hits", 0.1, 0.9)


@pytest.mark.parametrize("limit", [0.15, 0.34, 0.62, 0.87])
@pytest.mark.parametrize("cache", ["deepcache", "first_block_cache"])
def test_the_limit_is_found(cache: str, limit: float) -> None:
    calibration = cache_calibration._calibrate(cache, 8, tried_up_to(limit))
    assert calibration.best is not None
    assert calibration.best.setting == max(attempt.setting for attempt in calibration.tried if attempt.keeps)
    assert limit * 0.9 - 0.01 < calibration.best.setting <= limit
    assert len(calibration.tried) <= 8
    assert len({attempt.recipe for attempt in calibration.tried}) == len(calibration.tried), (
        "nothing is measured twice"
    )


def test_a_cache_that_never_hit_is_not_aggressive_enough() -> None:
    calibration = cache_calibration._calibrate("deepcache", 8, tried_up_to(0.8, hits_from=0.6))
    assert calibration.best is not None
    assert 0.7 < calibration.best.setting <= 0.8


def test_invalid_requests(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no step cache 'first_block'; did you mean .*first_block_cache"):
        calibrate_caches(CacheSearch("tiny-sd", ("first_block",), store=tmp_path))
    with pytest.raises(UsageError, match="no step cache 'tiny_vae'"):
        calibrate_caches(CacheSearch("tiny-sd", ("tiny_vae",), store=tmp_path))
    with pytest.raises(Unsupported, match="its images have no quality to keep"):
        calibrate_caches(CacheSearch("synthetic:flux-dev", store=tmp_path))


@pytest.mark.long
def test_calibrate_cache_prints_the_most_aggressive_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(PROMPT_SETS, "tinyworld", PROMPT_SETS["tinyworld"][:6])
    fewer = CATALOGUE["tiny-flux"].model_copy(update={"num_inference_steps": 20})
    monkeypatch.setitem(CATALOGUE, "tiny-flux", fewer)
    command = ["calibrate", "cache", "--model", "tiny-flux", "--cache", "first_block_cache"]
    command += ["--cache", "deepcache", "--runs", "1", "--seeds", "1", "--min-quality", "clip=0.9"]
    command += ["--store", str(tmp_path / "store")]
    assert typed(monkeypatch, *command) == 0
    printed = capsys.readouterr()
    first, second = printed.out.splitlines()
    assert first.startswith("first_block_cache(0.12): ")
    assert first.endswith(" of the steps reused")
    assert second.startswith("deepcache: none: ")
    assert "is no UNet" in second
    assert "first_block_cache(0.12): passed: CLIP margin kept" in printed.err
    assert typed(monkeypatch, *command, "--json") == 0, "from the store"
    calibrations = json.loads(capsys.readouterr().out)
    assert [calibration["cache"] for calibration in calibrations] == ["first_block_cache", "deepcache"]
    assert calibrations[0]["best"]["keeps"]
    assert 0.3 < calibrations[0]["best"]["hit_rate"] < 0.8
