"""FLUX.2 [dev] and [klein]: FLUX.1's blocks, which share one modulation per kind, and a language model for the text.

Of [dev], guidance is an input of the transformer. [klein] is distilled without guidance; its base models guide with a
second call. Source: diffusers, Flux2Transformer2DModel, Flux2Pipeline, Flux2KleinPipeline.
"""

from __future__ import annotations

from typing import Any

from vivace.architectures.family import Arguments, Blocks, Family, grid_of_ids, input_of, output_of


def _modulated(block: Any, image: Any, call: Arguments) -> Any:
    modulation = call[1]["temb_mod_img"]
    if modulation.ndim == 2:
        modulation = modulation.unsqueeze(1)
    shift, scale = modulation.chunk(6, dim=-1)[:2]
    return (1 + scale) * block.norm1(image) + shift


FLUX2 = Family(
    name="FLUX.2",
    denoiser="Flux2Transformer2DModel",
    pipelines=("Flux2Pipeline", "Flux2KleinPipeline"),
    embeddings={
        "Flux2Pipeline": ("prompt_embeds", None),
        "Flux2KleinPipeline": ("prompt_embeds", None),
    },
    not_by_diffusers="its single blocks return text and image as one tensor, its double blocks as two",
    blocks=Blocks(
        chains=("transformer_blocks", "single_transformer_blocks"),
        entering=output_of("x_embedder"),
        leaving=input_of("norm_out"),
        modulated=_modulated,
        grid=grid_of_ids,
        joined=("single_transformer_blocks",),
    ),
    last_text_state={"Flux2Pipeline": 30, "Flux2KleinPipeline": 27},
)
