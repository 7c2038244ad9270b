"""Recipes on pipelines of other families: random weights, real classes."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)

import vivace


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
