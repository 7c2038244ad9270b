"""TeaCache: polynomials fitted and kept, steps skipped by them or by a schedule."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests import exported
from tests.families import build, draw, drawn, psnr
from tests.typed import typed
from vivace.errors import Unsupported, UsageError
from vivace.machinery.step_caching.model_fits import Fit, find_fit, fit_polynomial, keep
from vivace.models import find_model
from vivace.runtime.cache_fits import calibrate_teacache
from vivace.runtime.memory.weightless import find_weightless

pytestmark = pytest.mark.usefixtures("small_images", "fresh_compiler")

CALL = {"num_inference_steps": 12}
LINE = Fit((1.0, 0.0), model="a line", high=10.0)
"""Every change is its own rescaled one."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path))
    return tmp_path / "teacache"


def inputs(transformer: Any) -> dict[str, Any]:
    config, generator = transformer.config, torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(1, 16, config.in_channels, generator=generator),
        "encoder_hidden_states": torch.randn(1, 7, config.joint_attention_dim, generator=generator),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim, generator=generator),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(7, 3),
    }


def test_a_hit_on_the_same_input_is_the_same_transformer_output() -> None:
    pipe = build("flux")
    arguments = inputs(pipe.transformer)
    with torch.no_grad():
        expected = pipe.transformer(**arguments).sample
        made = vivace.apply(pipe, "teacache(hits=0.99)")
        results = [pipe.transformer(**arguments).sample for _ in range(3)]
        (plain,) = pipe.transformer(**arguments, return_dict=False)
    for result in (*results, plain):
        assert torch.allclose(result, expected, atol=1e-5)
    assert made.evidence() == {"cache_hit_rate": 0.5, "cache_calls": 4}, (
        "the second is a miss by the schedule"
    )


# The fit


def test_the_published_polynomial_is_for_its_architecture(cache: Path) -> None:
    dev, schnell = (
        find_weightless(f"synthetic:flux-{name}").build().transformer for name in ("dev", "schnell")
    )
    published = find_fit(Fit, dev, "")
    assert published is not None
    assert find_fit(Fit, dev, "mine@1") == published
    assert find_fit(Fit, schnell, "") is None
    assert published.rescaled(0.1) == pytest.approx(np.polyval(published.coefficients, 0.1))
    own = Fit((2.0, 0.0), model="mine@1")
    keep(own, dev)
    assert find_fit(Fit, dev, "mine@1") == own, "what was fitted for the model comes first"
    assert find_fit(Fit, dev, "another@1") == published


def test_outside_of_what_was_seen() -> None:
    fit = Fit((1.0, 0.0, -1.0), model="a parabola", low=0.5, high=2.0)
    assert fit.rescaled(1.5) == pytest.approx(1.25)
    assert fit.rescaled(0.1) == fit.rescaled(0.5) == 0.0, "a change is never below 0"
    assert fit.rescaled(4.0) == pytest.approx(2 * fit.rescaled(2.0)), "in proportion"


def test_a_fit_finds_the_polynomial_again() -> None:
    x = np.linspace(0.1, 1, 40)
    y = 3 * x**2 - 0.5 * x + 0.2
    fit = fit_polynomial(list(zip(x, y, strict=True)), 2, "made up", 41)
    assert fit.coefficients == pytest.approx((3, -0.5, 0.2))
    assert (fit.residual, fit.explained) == (pytest.approx(0, abs=1e-9), pytest.approx(1))
    assert (fit.low, fit.high, fit.num_pairs, fit.degree) == (0.1, 1.0, 40, 2)
    noisy = fit_polynomial(list(zip(x, y + 0.1 * (-1) ** np.arange(40), strict=True)), 2, "made up", 41)
    assert noisy.residual == pytest.approx(0.1, rel=0.1)
    assert noisy.explained < 1
    with pytest.raises(ValueError, match="3 pairs of steps are too few for a polynomial of degree 2"):
        fit_polynomial([(0.1, 0.1)] * 3, 2, "made up", 4)
    with pytest.raises(ValueError, match="not finite"):
        fit_polynomial([(math.nan, 0.1)] * 6, 2, "made up", 4)


@pytest.mark.parametrize("content", ["", "{}", '{"version": 0}', '{"version": 1, "fit": {"model": ""}}'])
def test_a_damaged_fit_counts_as_none(content: str, cache: Path) -> None:
    transformer = build("flux").transformer
    file = keep(LINE, transformer)
    assert find_fit(Fit, transformer, LINE.model) == find_fit(Fit, transformer, "") == LINE
    file.write_text(content)
    assert find_fit(Fit, transformer, LINE.model) is None
    assert find_fit(Fit, transformer, "") is None


@pytest.mark.long
def test_teacache_is_calibrated_by_hand(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    command = [
        "calibrate",
        "teacache",
        "--model",
        "tiny-flux",
        "--num-inference-steps",
        "12",
        "--pictures",
        "2",
    ]
    assert typed(monkeypatch, *command, "--threads", "1", "--json") == 0
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    assert printed.err.count("/2]") == 2
    assert (answer["num_pairs"], answer["degree"], answer["num_steps"]) == (22, 4, 12)
    assert answer["explained"] > 0.5
    assert Path(answer["file"]).parent == cache
    made = vivace.load("tiny-flux", "teacache(0.3)+steps(12)")
    assert (
        made.effects["teacache@denoiser"]["denoiser.teacache_polynomial"]
        == f"degree 4, fitted on {answer['model']}"
    )
    picture = draw(made, **CALL)
    assert 0.1 < float(made.evidence()["cache_hit_rate"]) < 0.9
    assert psnr(picture, drawn("flux", **CALL)) > 15
    # A pipeline of unknown origin, as in a script, takes the latest fit of its architecture.
    recipe = "teacache(0.3)+steps(12)"
    written = exported.write("tiny-flux", recipe, call={"height": 128, "width": 128})
    assert written.own == ["teacache(0.3)"]
    expected = exported.with_vivace("tiny-flux", recipe, {"height": 128, "width": 128})
    (tmp_path / "script").mkdir()
    assert np.array_equal(exported.run(written.text, tmp_path / "script"), expected)


def test_what_cannot_be_calibrated(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert typed(monkeypatch, "calibrate", "teacache", "--model", "tiny-sd", "--pictures", "1") == 3
    assert "UNet2DConditionModel has no chain of blocks" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"3 pairs of steps are too few.*give more --images"):
        calibrate_teacache(
            find_model("tiny-flux"), "cpu", ["a star"], num_images=1, call={"num_inference_steps": 4}
        )
    with pytest.raises(Unsupported, match="random weights, so there is nothing to measure"):
        calibrate_teacache(find_model("synthetic:flux-dev"), "cpu", ["a star"])
    assert not cache.exists()


def test_a_named_model_is_told_how_to_fit(cache: Path) -> None:
    with pytest.raises(
        Unsupported, match=r"fit one, once: vivace calibrate teacache --model tiny-flux; or give a"
    ):
        vivace.load("tiny-flux", "teacache")
