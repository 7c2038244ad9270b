"""FLUX.1: double blocks, which keep text and image apart, then single ones.

Guidance is an input of the transformer; true guidance, with a negative prompt, is a second call.
Kontext, which edits, takes a image's latents as further tokens behind the image's own.
Source: diffusers, FluxTransformer2DModel, FluxPipeline, FluxKontextPipeline.
"""

from __future__ import annotations

from typing import Any

from vivace.architectures.family import (
    Arguments,
    Blocks,
    Family,
    PublishedFit,
    grid_of_ids,
    input_of,
    output_of,
)


def _modulated(block: Any, image: Any, call: Arguments) -> Any:
    return block.norm1(image, emb=call[1]["temb"])[0]


_DEV_CONFIG = {
    "num_layers": 19,
    "num_single_layers": 38,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "guidance_embeds": True,
}


def _ratios() -> tuple[float, ...]:
    from diffusers.hooks.mag_cache import FLUX_MAG_RATIOS

    return tuple(float(ratio) for ratio in FLUX_MAG_RATIOS)


def _polynomial() -> tuple[float, ...]:
    return 4.98651651e02, -2.83781631e02, 5.58554382e01, -3.82021401e00, 2.64230861e-01


FLUX = Family(
    name="FLUX.1",
    denoiser="FluxTransformer2DModel",
    pipelines=("FluxPipeline", "FluxKontextPipeline"),
    embeddings={
        "FluxPipeline": ("prompt_embeds", "pooled_prompt_embeds", None),
        "FluxKontextPipeline": ("prompt_embeds", "pooled_prompt_embeds", None),
    },
    blocks=Blocks(
        chains=("transformer_blocks", "single_transformer_blocks"),
        entering=output_of("x_embedder"),
        leaving=input_of("norm_out"),
        modulated=_modulated,
        grid=grid_of_ids,
        added_between=("controlnet_block_samples", "controlnet_single_block_samples"),
    ),
    cache_fits={
        "magcache": PublishedFit(_ratios, "FLUX.1 [dev]", "published for FLUX.1 (diffusers)", _DEV_CONFIG),
        "teacache": PublishedFit(
            _polynomial, "FLUX.1 [dev]", "published for FLUX.1 [dev] (TeaCache4FLUX)", _DEV_CONFIG
        ),
    },
)
