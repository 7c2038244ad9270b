"""Recipes on pipelines of other families: random weights, real classes."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)

import vivace
from tests.targets import target_of
from vivace.errors import Unsupported
from vivace.measure.machine import this_machine
from vivace.techniques.first_block_cache import FirstBlockCache


def vae(channels: int) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        force_upcast=False,
        shift_factor=0.0,
    )


@pytest.fixture
def sdxl() -> Any:
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        cross_attention_dim=64,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
        transformer_layers_per_block=(1, 2),
        use_linear_projection=True,
    )
    pipe = StableDiffusionXLPipeline(vae(4), None, None, None, None, unet, EulerDiscreteScheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def flux() -> Any:
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    pipe = FluxPipeline(scheduler, vae(4), None, None, None, None, transformer)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw_sdxl(session: Any, batch: int = 1) -> np.ndarray:
    generator = torch.Generator().manual_seed(1)
    embeds = [torch.randn(batch, 7, 64, generator=generator) for _ in range(2)]
    pooled = [torch.randn(batch, 32, generator=generator) for _ in range(2)]
    result = session(
        prompt_embeds=embeds[0],
        negative_prompt_embeds=embeds[1],
        pooled_prompt_embeds=pooled[0],
        negative_pooled_prompt_embeds=pooled[1],
        height=32,
        width=32,
        num_inference_steps=4,
        generator=[torch.Generator().manual_seed(k) for k in range(batch)],
        output_type="np",
    )
    return np.asarray(result.images)


def draw_flux(session: Any, **call: Any) -> np.ndarray:
    result = session(
        prompt_embeds=torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(1)),
        pooled_prompt_embeds=torch.randn(1, 32, generator=torch.Generator().manual_seed(2)),
        height=32,
        width=32,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
        **call,
    )
    return np.asarray(result.images)


@pytest.mark.parametrize(
    "recipe",
    [
        "bf16",
        "bf16@denoiser",
        "bf16@vae",
        "int8",
        "channels_last",
        "attention(math)",
        "compile(backend=eager)@denoiser,vae",
    ],
)
@pytest.mark.quick("bf16", "int8", "channels_last")
def test_same_picture_recipes_on_sdxl(sdxl: Any, recipe: str) -> None:
    reference = draw_sdxl(sdxl)
    picture = draw_sdxl(vivace.apply(sdxl, recipe))
    assert np.isfinite(picture).all()
    assert np.abs(picture - reference).mean() < 0.05


@pytest.mark.parametrize("batch", [1, 3])
def test_cfg_cutoff_on_sdxl_at_any_batch_size(sdxl: Any, batch: int) -> None:
    session = vivace.apply(sdxl, "cfg_cutoff(0.5)")
    picture = draw_sdxl(session, batch)
    assert picture.shape == (batch, 32, 32, 3)
    assert np.isfinite(picture).all()
    assert session.evidence() == {"guided_steps": 2, "unguided_steps": 2}


@pytest.mark.parametrize(
    "recipe",
    [
        "bf16",
        "bf16@denoiser",
        "int8",
        "attention(math)",
        "compile(backend=eager)",
        "bf16+int8+attention(math)",
    ],
)
@pytest.mark.quick("bf16", "bf16+int8*", "compile*")
def test_same_picture_recipes_on_flux(flux: Any, recipe: str) -> None:
    reference = draw_flux(flux)
    picture = draw_flux(vivace.apply(flux, recipe))
    assert np.isfinite(picture).all()
    assert np.abs(picture - reference).mean() < 0.05


def test_what_flux_cannot_do_is_said_in_words(flux: Any) -> None:
    with pytest.raises(Unsupported, match="is not compatible with"):
        vivace.apply(flux, "scheduler(ddim)")


def test_first_block_cache_hits_on_its_schedule(flux: Any) -> None:
    reference = draw_flux(flux)
    session = vivace.apply(flux, "first_block_cache(hits=0.5)")
    for _ in range(2):
        picture = draw_flux(session)
        assert not np.array_equal(picture, reference), "a hit changes the image"
    # Two images of three steps: compute, compute, hit; then the same again from a clean state.
    assert session.evidence() == {"cache_hit_rate": pytest.approx(1 / 3), "cache_calls": 6}
    assert session.refuted({}) is None


def test_first_block_cache_starts_anew_after_a_call_that_failed(flux: Any) -> None:
    session = vivace.apply(flux, "first_block_cache(hits=0.5)")
    first = draw_flux(session)

    def fail(*_: Any) -> Any:
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        draw_flux(session, callback_on_step_end=fail)
    assert np.array_equal(draw_flux(session), first)


def test_first_block_cache_counts_the_steps_of_each_of_guidances_calls(flux: Any) -> None:
    session = vivace.apply(flux, "first_block_cache(hits=0.5)")
    negative = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(3))
    draw_flux(
        session,
        true_cfg_scale=2.0,
        negative_prompt_embeds=negative,
        negative_pooled_prompt_embeds=torch.zeros(1, 32),
    )
    # Compute, compute, hit: in each of both.
    assert session.evidence() == {"cache_hit_rate": pytest.approx(1 / 3), "cache_calls": 6}


def test_flux_hits_more_at_a_higher_threshold(flux: Any) -> None:
    rates = []
    for threshold in (0.0, 0.1, 10.0):
        flux.transformer.disable_cache()
        session = vivace.apply(flux, f"first_block_cache({threshold})")
        draw_flux(session)
        rates.append(float(session.evidence()["cache_hit_rate"]))
        assert (session.refuted({}) is None) == (rates[-1] > 0)
    assert rates[0] == 0.0
    assert rates[-1] == pytest.approx(2 / 3), "all but the first step"
    assert rates == sorted(rates)


@pytest.mark.parametrize(
    "recipe", ["compile(backend=eager)", "bf16", "int8", "bf16+int4+compile(backend=eager)"]
)
@pytest.mark.slow("*compile*")
@pytest.mark.exhaustive("bf16+int4*")
def test_first_block_cache_composes(flux: Any, recipe: str) -> None:
    session = vivace.apply(flux, f"first_block_cache(hits=0.5)+{recipe}")
    assert np.isfinite(draw_flux(session)).all()
    assert session.evidence()["cache_hit_rate"] == pytest.approx(1 / 3)


def test_one_step_cache_at_a_time(flux: Any) -> None:
    vivace.apply(flux, "fbcache(0.1)")
    with pytest.raises(Unsupported, match="only one step cache at a time can work"):
        vivace.apply(flux, "fbcache(0.2)")


def test_unets_have_nothing_for_a_first_block_cache(sdxl: Any) -> None:
    with pytest.raises(Unsupported, match="no chain of transformer blocks"):
        vivace.apply(sdxl, "fbcache")


def test_first_block_cache_on_random_weights_takes_a_fixed_schedule_only(flux: Any) -> None:
    target = target_of(machine=this_machine("cpu"), pipe=flux, has_random_weights=True)
    reason = FirstBlockCache(threshold=0.1).unsupported(target)
    assert reason is not None
    assert "first_block_cache(hits=0.5)" in reason
    assert FirstBlockCache(hits=0.5).unsupported(target) is None
