"""LongCat-Image's transformer over fused weights: FLUX.1's blocks, modulated by the timestep alone.

Source: diffusers, LongCatImageTransformer2DModel.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from vivace.machinery.fused.block_forward import BlockForward
from vivace.machinery.fused.calls import cast_last
from vivace.machinery.fused.forms import FusedForm, FusedTransformer
from vivace.machinery.fused.hoisted_blocks import FirstBlock, FirstNorm, HoistedBlocks
from vivace.machinery.fused.models.flux import FLUX
from vivace.machinery.fused.operations import Places


class LongCatForward:
    """Replaces a transformer's forward; the embedders, the last norm and projection stay diffusers'."""

    def __init__(self, transformer: Any, fused: HoistedBlocks) -> None:
        self.num_calls = 0
        self._transformer = transformer
        self._modulations = fused.modulations
        self._blocks = BlockForward(
            fused.blocks, transformer.inner_dim, transformer.config.num_attention_heads
        )

    def __call__(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        img_ids: torch.Tensor,
        txt_ids: torch.Tensor,
        guidance: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> Any:
        transformer, dtype = self._transformer, hidden_states.dtype
        self.num_calls += 1
        image = transformer.x_embedder(hidden_states)
        text = transformer.context_embedder(encoder_hidden_states)
        conditions, embedding = self.inputs_of(timestep, None, None, dtype)
        rope = self._blocks.rope(torch.cat([txt_ids, img_ids]))
        image = self._blocks(text, image, rope, self._modulations(conditions, embedding))
        image = transformer.proj_out(transformer.norm_out(image, embedding)).to(dtype)
        return Transformer2DModelOutput(sample=image) if return_dict else (image,)

    def inputs_of(
        self, timestep: torch.Tensor, _: None, __: None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys of the table of modulations (batch, 1), and the embeddings (batch, channels)."""
        timestep = timestep.to(dtype)
        return timestep[:, None].float(), self._transformer.time_embed(timestep * 1000, torch.bfloat16)


def _fuse(
    transformer: Any, pipe: Any, quantize: bool, bounded: tuple[bool, ...], places: Places
) -> FusedTransformer:
    for layer in (transformer.x_embedder, transformer.context_embedder):
        # They get what the pipeline has, in any dtype; so they do where a step cache calls diffusers' forward.
        layer.register_forward_pre_hook(cast_last)
    fused = HoistedBlocks(transformer, FLUX, 1, quantize, bounded, places)
    transformer.transformer_blocks.append(FirstBlock(FirstNorm(fused.modulations)))
    return fused.hoist(transformer, pipe, LongCatForward(transformer, fused), reads_text=False)


FORM = FusedForm(("transformer_blocks", "single_transformer_blocks"), _fuse)
