"""TaylorSeer: outputs predicted from those of the last computed steps."""

import pytest
import torch
from diffusers import TaylorSeerCacheConfig

import vivace
from tests.families import FAMILIES, build, draw, drawn, psnr, session
from vivace.machinery.step_caching.engine import CacheState
from vivace.machinery.step_caching.what import Taylor
from vivace.machinery.technique import component_of

pytestmark = pytest.mark.usefixtures("small_images", "fresh_compiler")

CALL = {"num_inference_steps": 12}


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_a_polynomial_path_is_continued_exactly(order: int) -> None:
    """Newton's differences of a straight line are its slope; of order 0, the last value is repeated."""
    series, state = Taylor(order, in_fp32=True), CacheState()
    for step in (0, 1, 3):
        state.step = step
        state.previous, state.kept = state.kept, ()
        state.kept = series.keep(state, (torch.tensor([2.0 * step + 1], dtype=torch.float64),))
    assert len(state.kept) == min(order, 2) + 1
    state.step = 5
    (extrapolated,) = series.predict(state)
    assert extrapolated.dtype == torch.float64
    assert float(extrapolated) == pytest.approx(7 if order == 0 else 11)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize(("interval", "warmup"), [(3, 3), (2, 1), (4, 2)])
@pytest.mark.diagonal
@pytest.mark.quick("4-2-2", "2-1-1")
def test_taylorseer_draws_what_diffusers_draws(order: int, interval: int, warmup: int) -> None:
    pipe = build("flux")
    config = TaylorSeerCacheConfig(
        cache_interval=interval,
        disable_cache_before_step=warmup,
        max_order=order,
        taylor_factors_dtype=torch.float32,
        use_lite_mode=True,
    )
    pipe.transformer.enable_cache(config)
    expected = draw(vivace.apply(pipe), **CALL)
    made = session("flux", f"taylorseer({interval}, order={order}, warmup={warmup})")
    assert psnr(draw(made, **CALL), expected) > 80
    assert made.refuted({}) is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.quick("sd")
def test_a_hit_does_not_call_the_denoiser(family: str) -> None:
    made = session(family, "taylorseer")
    calls: list[int] = []
    denoiser = component_of(made.pipe, "denoiser")
    first = denoiser.x_embedder if family == "flux" else denoiser.conv_in
    first.register_forward_hook(lambda *_: calls.append(1))
    picture = draw(made, **CALL)
    # Computed: 0, 1, 2, then 4, 7, 10.
    assert len(calls) == 6
    assert made.evidence() == {"cache_hit_rate": 0.5, "cache_calls": 12}
    assert 8 < psnr(picture, drawn(family, **CALL)) < 100
