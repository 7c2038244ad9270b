"""Qwen-Image: blocks of text and image apart. Guidance is a second call, with a negative prompt.

Pipelines that edit take the image's latents as further tokens, and show it to the text encoder.
Source: diffusers, QwenImageTransformer2DModel, QwenImagePipeline, QwenImageEditPipeline, QwenImageEditPlusPipeline.
"""

from __future__ import annotations

from typing import Any

from vivace.architectures.family import Arguments, Blocks, Family, input_of, output_of


def _modulated(block: Any, image: Any, call: Arguments) -> Any:
    kwargs = call[1]
    first, _ = block.img_mod(kwargs["temb"]).chunk(2, dim=-1)
    return block._modulate(block.img_norm1(image), first, kwargs.get("modulate_index"))[0]


def _grid(_: Any, call: Arguments) -> tuple[int, int]:
    """Return the grid; images to be edited come after the generated one."""
    _, rows, columns = call[1]["img_shapes"][0][0]
    return rows, columns


def _not_captured(transformer: Any) -> str:
    """Return why no graph is captured: Qwen-Image-Edit-2511 modulates its sources' tokens by a timestep of 0."""
    copies = transformer.config.get("zero_cond_t", False)
    return "its transformer copies from the host which tokens are the sources'" if copies else ""


QWEN_IMAGE = Family(
    name="Qwen-Image",
    denoiser="QwenImageTransformer2DModel",
    pipelines=("QwenImagePipeline", "QwenImageEditPipeline", "QwenImageEditPlusPipeline"),
    embeddings={"QwenImagePipeline": ("prompt_embeds", "prompt_embeds_mask")},
    blocks=Blocks(
        chains=("transformer_blocks",),
        entering=output_of("img_in"),
        leaving=input_of("norm_out"),
        modulated=_modulated,
        grid=_grid,
        added_between=("controlnet_block_samples",),
    ),
    text_of_any_length=True,
    not_captured=_not_captured,
    last_text_state={
        "QwenImagePipeline": -1,
        "QwenImageEditPipeline": -1,
        "QwenImageEditPlusPipeline": -1,
    },
)
