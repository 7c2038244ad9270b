"""Z-Image: a few refining blocks for image and text apart, then one stream of both, the image first.

The transformer takes a list of latents and a list of texts, and returns a list. Guidance adds the unconditional texts
to these lists, behind the conditional ones. Source: diffusers, ZImageTransformer2DModel, ZImagePipeline.
"""

from __future__ import annotations

from typing import Any

from vivace.architectures.family import Arguments, Blocks, Doubled, Family, input_of, returned_by


def _modulated(block: Any, image: Any, call: Arguments) -> Any:
    modulation = call[0][3]  # after the tokens, their mask and positions
    scale = block.adaLN_modulation(modulation).unsqueeze(1).chunk(4, dim=2)[0]
    return block.attention_norm1(image) * (1.0 + scale)


def _grid(_: Any, call: Arguments) -> tuple[int, int]:
    args, kwargs = call
    latents = (args[0] if args else kwargs["x"])[0]  # (channels, frames, height, width)
    return latents.shape[-2] // 2, latents.shape[-1] // 2


Z_IMAGE = Family(
    name="Z-Image",
    denoiser="ZImageTransformer2DModel",
    pipelines=("ZImagePipeline",),
    embeddings={"ZImagePipeline": ("prompt_embeds", "negative_prompt_embeds")},
    not_by_diffusers="it has no enable_cache",
    blocks=Blocks(
        chains=("layers",),
        entering=returned_by("_build_unified_sequence"),
        leaving=input_of("all_final_layer.2-1"),
        modulated=_modulated,
        grid=_grid,
        text=None,
        added_between=("controlnet_block_samples",),
        outside="the refining blocks",
    ),
    doubled=Doubled(off=0.0),
    rows_in_lists=True,
    pads_captions=True,
    padding_unread_by=("ZImagePipeline",),
)
