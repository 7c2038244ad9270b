"""Attention's outputs, kept between steps."""

from typing import Any

import pytest
from diffusers import PyramidAttentionBroadcastConfig, apply_pyramid_attention_broadcast

import vivace
from benchmarks.flops import count_denoiser
from tests.families import FAMILIES, build, draw, psnr, session
from vivace.machinery.technique import component_of

pytestmark = pytest.mark.usefixtures("small_images", "fresh_compiler")

CALL = {"num_inference_steps": 12}
SIZE = {"height": 128, "width": 128, "text_length": 32}


@pytest.mark.parametrize(("interval", "start", "until"), [(2, 800, 100), (3, 900, 50), (2, 1001, -1)])
@pytest.mark.parametrize("family", ["sd", "flux"])
@pytest.mark.diagonal
@pytest.mark.quick("flux*")
def test_pyramid_attention_draws_what_diffusers_draws(
    family: str, interval: int, start: int, until: int
) -> None:
    pipe = build(family)
    timesteps: list[float] = []

    def note(*_: Any) -> None:
        timesteps.append(float(pipe.scheduler.timesteps[len(timesteps)]))

    denoiser = component_of(pipe, "denoiser")
    denoiser.register_forward_pre_hook(note)
    config = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=interval,
        cross_attention_block_skip_range=interval,
        spatial_attention_timestep_skip_range=(until, start),
        cross_attention_timestep_skip_range=(until, start),
        current_timestep_callback=lambda: timesteps[-1],
    )
    apply_pyramid_attention_broadcast(denoiser, config)
    expected = draw(vivace.apply(pipe), **CALL)
    made = session(family, f"pyramid_attention({interval}, start={start}, until={until})")
    for _ in range(2):
        assert psnr(draw(made, **CALL), expected) > 80
    assert 0.1 < float(made.evidence()["cache_hit_rate"]) < 0.7
    assert made.refuted({}) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hit_computes_no_attention(family: str) -> None:
    pipe = build(family)
    denoiser = component_of(pipe, "denoiser")
    alone = count_denoiser(denoiser, **SIZE)
    made = vivace.apply(pipe, "pyramid_attention(hits=0.99)")
    whole, again, hit = (count_denoiser(denoiser, **SIZE) for _ in range(3))
    assert whole == again == alone, "nothing is computed for the cache's own sake"
    # The VAE aside, tiny models have attention in the denoiser's blocks alone.
    assert hit.attention == 0
    assert 0 < hit.total < 0.9 * alone.total
    (effect,) = made.effects.values()
    assert effect["denoiser.reused_attentions"] == sum(
        hasattr(m, "set_processor") for m in denoiser.modules()
    )
