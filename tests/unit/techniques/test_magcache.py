"""MagCache: steps skipped by a table of ratios, published or measured."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import MagCacheConfig
from diffusers.hooks.mag_cache import FLUX_MAG_RATIOS, nearest_interp

import vivace
from tests.families import build, draw, drawn, psnr
from tests.targets import target_of
from tests.typed import typed
from vivace.errors import Unsupported, UsageError
from vivace.machinery.step_caching.block_residual import watching_residuals
from vivace.machinery.step_caching.model_fits import Ratios, find_fit, keep, mean_of, ratios_of
from vivace.machinery.technique import Machine
from vivace.models import find_model
from vivace.runtime.cache_fits import calibrate_magcache
from vivace.runtime.memory.weightless import find_weightless
from vivace.techniques.magcache import Magcache

pytestmark = pytest.mark.usefixtures("short_calls", "fresh_compiler")

CALL = {"num_inference_steps": 14}
FLUX = Ratios(tuple(float(r) for r in FLUX_MAG_RATIOS), model="FLUX's")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path / "cache"))


def with_ratios(recipe: str, ratios: Ratios = FLUX) -> Any:
    pipe = build("flux")
    keep(ratios, pipe.transformer)
    return vivace.apply(pipe, recipe)


@pytest.mark.parametrize("num_steps", [14, 28])
@pytest.mark.parametrize(
    ("threshold", "max_skip", "retention"), [(0.06, 3, 0.2), (0.24, 5, 0.1), (0.3, 2, 0.0)]
)
@pytest.mark.diagonal
@pytest.mark.quick("0.06*")
def test_magcache_draws_what_diffusers_draws(
    threshold: float, max_skip: int, retention: float, num_steps: int
) -> None:
    pipe = build("flux")
    config = MagCacheConfig(
        threshold=threshold,
        max_skip_steps=max_skip,
        retention_ratio=retention,
        num_inference_steps=num_steps,
        mag_ratios=FLUX_MAG_RATIOS,
    )
    pipe.transformer.enable_cache(config)
    expected = draw(vivace.apply(pipe), num_inference_steps=num_steps)
    made = with_ratios(f"magcache({threshold}, max_skip={max_skip}, retention={retention})")
    for _ in range(2):
        assert psnr(draw(made, num_inference_steps=num_steps), expected) > 80
    assert made.refuted({}) is None


def test_the_table_of_another_number_of_steps() -> None:
    for num_steps in (1, 4, 20, 28, 50):
        expected = nearest_interp(FLUX_MAG_RATIOS, num_steps)
        assert [FLUX.at(step, num_steps) for step in range(num_steps)] == pytest.approx(expected.tolist())
    assert FLUX.at(28, 28) == 1.0, "after the end, as some schedulers go"


def test_whose_table_it_is() -> None:
    dev, schnell = (
        find_weightless(f"synthetic:flux-{name}").build().transformer for name in ("dev", "schnell")
    )
    published = find_fit(Ratios, dev, "mine@1")
    assert published is not None
    assert published.ratios == FLUX.ratios
    assert find_fit(Ratios, schnell, "") is None
    own = Ratios((1.0, 0.9), model="mine@1")
    keep(own, dev)
    assert find_fit(Ratios, dev, "mine@1") == own
    assert find_fit(Ratios, dev, "another@1") == published
    # What decides is the table, so that random weights of its architecture take it.
    for pipe, expected in (
        (find_weightless("synthetic:flux-dev").build(), None),
        (build("flux"), "depends on training"),
    ):
        target = target_of(Machine("cpu", "CPU", None, None), pipe, has_random_weights=True)
        reason = Magcache().unsupported(target)
        assert reason is None if expected is None else expected in (reason or "")
        assert Magcache(hits=0.5).unsupported(target) is None


def test_what_is_measured() -> None:
    """Residuals that grow by a tenth a step, and one that does not."""
    growing = [torch.full((1, 4, 8), 1.1**k) for k in range(4)]
    assert ratios_of(growing) == pytest.approx((1.0, 1.1, 1.1, 1.1))
    mean = mean_of([ratios_of(growing), (1.0, 1.0, 1.0, 1.0)], "made up")
    assert mean.ratios == pytest.approx((1.0, 1.05, 1.05, 1.05))
    assert (mean.spread, mean.num_pictures) == (pytest.approx(0.05), 2)
    with pytest.raises(ValueError, match="one step"):
        ratios_of(growing[:1])
    with pytest.raises(ValueError, match="not finite"):
        ratios_of([growing[0], growing[1] * float("nan")])
    pipe = build("flux")
    with watching_residuals(pipe.transformer) as residuals:
        draw(vivace.apply(pipe), num_inference_steps=5)
    assert len(residuals) == 5
    assert not pipe.transformer.norm_out._forward_pre_hooks


@pytest.mark.long
def test_magcache_is_calibrated_by_hand(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with pytest.raises(
        Unsupported, match=r"measure one, once: vivace calibrate magcache --model tiny-flux; or give"
    ):
        vivace.load("tiny-flux", "magcache")
    command = [
        "calibrate",
        "magcache",
        "--model",
        "tiny-flux",
        "--num-inference-steps",
        "14",
        "--pictures",
        "2",
    ]
    assert typed(monkeypatch, *command, "--threads", "1", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (len(answer["ratios"]), answer["ratios"][0], answer["num_pictures"]) == (14, 1.0, 2)
    assert 0 < answer["spread"] < 0.2
    made = vivace.load("tiny-flux", "magcache(0.2)")
    assert made.effects["magcache@denoiser"]["denoiser.magcache_ratios"] == f"measured on {answer['model']}"
    picture = draw(made, **CALL)
    assert 0.1 < float(made.evidence()["cache_hit_rate"]) < 0.8
    assert psnr(picture, drawn("flux", **CALL)) > 20
    assert typed(monkeypatch, *command[:2], "--model", "tiny-sd") == 3
    assert "UNet2DConditionModel has no chain of blocks" in capsys.readouterr().err
    with pytest.raises(UsageError, match="an image of one step has nothing that could be skipped"):
        calibrate_magcache(
            find_model("tiny-flux"), "cpu", ["a star"], num_images=1, call={"num_inference_steps": 1}
        )
