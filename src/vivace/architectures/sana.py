"""Sana and Sana-Sprint: linear attention over the image, attention to the text, convolutions in the MLP.

Sana-Sprint's guidance is an input of the transformer. Source: diffusers, SanaTransformer2DModel, SanaPipeline.
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
    timestep = call[0][4]  # after the tokens, their mask, the text and its mask
    modulation = block.scale_shift_table[None] + timestep.reshape(image.shape[0], 6, -1)
    shift, scale = modulation.chunk(6, dim=1)[:2]
    return block.norm1(image) * (1 + scale) + shift


def _patch(transformer: Any) -> int:
    return int(transformer.config.patch_size)


SANA = Family(
    name="Sana",
    denoiser="SanaTransformer2DModel",
    pipelines=("SanaPipeline", "SanaSprintPipeline"),
    embeddings={
        "SanaPipeline": (
            "prompt_embeds",
            "prompt_attention_mask",
            "negative_prompt_embeds",
            "negative_prompt_attention_mask",
        ),
        "SanaSprintPipeline": ("prompt_embeds", "prompt_attention_mask"),
    },
    not_by_diffusers="it has no enable_cache",
    blocks=Blocks(
        chains=("transformer_blocks",),
        entering=output_of("patch_embed"),
        leaving=input_of("norm_out"),
        modulated=_modulated,
        grid=grid_of_latents(_patch),
        text=None,
        added_between=("controlnet_block_samples",),
    ),
    doubled=Doubled(),
    cells=_patch,
)
