"""Chroma's transformer over fused weights: FLUX.1's blocks, whose modulations a small network of diffusers' makes.

The pipeline's mask is added to attention's logits in each call, so attention is computed in bf16.
Source: diffusers, ChromaTransformer2DModel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import nn

from vivace.machinery.fused.block_forward import FusedForward
from vivace.machinery.fused.block_weights import FusedBlocks, of_image
from vivace.machinery.fused.calls import cast_inputs, cast_last, refuse_controlnet, refuse_extras
from vivace.machinery.fused.forms import FusedForm, FusedTransformer, Fusing
from vivace.machinery.fused.hoisted_blocks import FirstBlock
from vivace.machinery.fused.models.flux import FLUX
from vivace.machinery.fused.modulations import OF_DOUBLE, OF_SINGLE

CHROMA = replace(FLUX, modulations=None)


class ChromaForward(FusedForward):
    """Replaces a transformer's forward; the embedders, what makes the modulations, the last norm and projection
    stay."""

    def __init__(self, transformer: Any, fused: FusedBlocks) -> None:
        super().__init__(transformer, fused)
        self._order = _order(len(fused.doubles), len(fused.singles))

    def __call__(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        img_ids: torch.Tensor,
        txt_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        controlnet_block_samples: Any = None,
        controlnet_single_block_samples: Any = None,
        return_dict: bool = True,
        controlnet_blocks_repeat: bool = False,
    ) -> Any:
        refuse_controlnet(controlnet_block_samples, controlnet_single_block_samples)
        refuse_extras(joint_attention_kwargs)
        transformer, dtype = self._transformer, hidden_states.dtype
        image = transformer.x_embedder(hidden_states)
        text = transformer.context_embedder(encoder_hidden_states)
        vectors = transformer.distilled_guidance_layer(self._inputs(timestep.to(dtype) * 1000))
        modulations = torch.cat([vectors[:, part] for part in self._order], dim=1).flatten(1)
        rope = self._blocks.rope(torch.cat([of_image(txt_ids), of_image(img_ids)]))
        mask = None
        if attention_mask is not None:
            # As diffusers multiplies it: a mask of numbers is added to the logits, one of truth values leaves keys out.
            mask = attention_mask[:, None, None, :] * attention_mask[:, None, :, None]
            mask = mask.to(image.dtype) if mask.is_floating_point() else mask
        image = self._blocks(text, image, rope, modulations, mask)
        image = self._predicted(image, vectors[:, -2:], dtype)
        return Transformer2DModelOutput(sample=image) if return_dict else (image,)

    def _inputs(self, timestep: torch.Tensor) -> torch.Tensor:
        """Return what diffusers' `time_text_embed` does, (batch, vectors, channels), without a tensor on the host."""
        embed = self._transformer.time_text_embed
        rows = torch.cat([embed.time_proj(timestep), embed.guidance_proj(torch.zeros_like(timestep))], dim=1)
        numbers = embed.mod_proj.to(timestep.dtype)
        own = rows.to(timestep.dtype)[:, None].expand(-1, len(numbers), -1)
        return torch.cat([own, numbers.expand(len(own), -1, -1)], dim=-1)


def _order(num_doubles: int, num_singles: int) -> list[slice]:
    """Return vectors in the order of `FusedArchitecture`; Chroma has single blocks', the image's, then the text's."""
    image, half = OF_SINGLE * num_singles, OF_DOUBLE // 2
    text = image + half * num_doubles
    starts = [start + half * block for block in range(num_doubles) for start in (image, text)]
    return [*(slice(start, start + half) for start in starts), slice(0, image)]


def _fuse(transformer: Any, pipe: Any, how: Fusing) -> FusedTransformer:
    embedders = transformer.x_embedder, transformer.context_embedder, transformer.distilled_guidance_layer
    cast_inputs(cast_last, *embedders)
    lists = transformer.transformer_blocks, transformer.single_transformer_blocks
    counts, first = [len(blocks) for blocks in lists], lists[0][0].norm1
    fused = FusedBlocks(transformer, CHROMA, how)
    lists[0].append(FirstBlock(first))
    for blocks, count in zip(lists, counts, strict=True):
        # diffusers' forward, which step caches call, finds a block's modulations by how many blocks there are.
        blocks.extend(nn.Identity() for _ in range(count - len(blocks)))
    transformer.forward = forward = ChromaForward(transformer, fused)
    return FusedTransformer(fused, lambda: forward.num_calls)


FORM = FusedForm(
    ("transformer_blocks", "single_transformer_blocks"),
    _fuse,
    exact=("time_text_embed.mod_proj",),
    always_masked=True,
)
