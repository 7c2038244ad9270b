"""Stable Diffusion 3 and 3.5: blocks of text and image apart; of 3.5 Medium some attend to the image once more.

Source: diffusers, SD3Transformer2DModel, StableDiffusion3Pipeline.
"""

from __future__ import annotations

from typing import Any

from vivace.architectures.family import (
    Arguments,
    Blocks,
    Doubled,
    Family,
    grid_of_latents,
    input_of,
    output_of,
)


def _modulated(block: Any, image: Any, call: Arguments) -> Any:
    return block.norm1(image, emb=call[1]["temb"])[0]


def _patch(transformer: Any) -> int:
    return int(transformer.config.patch_size)


SD3 = Family(
    name="Stable Diffusion 3",
    denoiser="SD3Transformer2DModel",
    pipelines=("StableDiffusion3Pipeline",),
    embeddings={
        "StableDiffusion3Pipeline": (
            "prompt_embeds",
            "negative_prompt_embeds",
            "pooled_prompt_embeds",
            "negative_pooled_prompt_embeds",
        )
    },
    not_by_diffusers="it has no enable_cache",
    blocks=Blocks(
        chains=("transformer_blocks",),
        entering=output_of("pos_embed"),
        leaving=input_of("norm_out"),
        modulated=_modulated,
        grid=grid_of_latents(_patch),
        added_between=("block_controlnet_hidden_states",),
    ),
    doubled=Doubled(),
    cells=_patch,
)
