"""CogView4: blocks of text and image apart, the image first, and a language model for the text.

Guidance is a second call, with a negative prompt. Source: diffusers, CogView4Transformer2DModel, CogView4Pipeline.
"""

from __future__ import annotations

from typing import Any

from vivace.architectures.family import Arguments, Blocks, Family, grid_of_latents, input_of, output_of


def _modulated(block: Any, image: Any, call: Arguments) -> Any:
    text, timestep = call[0][1:3]
    return block.norm1(image, text, timestep)[0]


def _patch(transformer: Any) -> int:
    return int(transformer.config.patch_size)


COGVIEW4 = Family(
    name="CogView4",
    denoiser="CogView4Transformer2DModel",
    pipelines=("CogView4Pipeline",),
    embeddings={"CogView4Pipeline": ("prompt_embeds", "negative_prompt_embeds")},
    blocks=Blocks(
        chains=("transformer_blocks",),
        entering=output_of("patch_embed.proj"),
        leaving=input_of("norm_out"),
        modulated=_modulated,
        grid=grid_of_latents(_patch),
        text=1,
        returns_text_first=False,
    ),
    text_of_any_length=True,
    cells=_patch,
)
