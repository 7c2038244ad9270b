"""FLUX.1: double blocks, which keep text and image apart, then single ones.

Guidance is an input of the transformer; true guidance, with a negative prompt, is a second call.
Kontext, which edits, takes a image's latents as further tokens behind the image's own.
Source: diffusers, FluxTransformer2DModel, FluxPipeline, FluxKontextPipeline.
"""

from __future__ import annotations

from typing import Any

from vivace.architectures.family import Arguments, Blocks, Family, grid_of_ids, input_of, output_of


def _modulated(block: Any, image: Any, call: Arguments) -> Any:
    return block.norm1(image, emb=call[1]["temb"])[0]


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
)
