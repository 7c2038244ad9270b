"""LongCat-Image's transformer over fused weights: FLUX.1's blocks, modulated by the timestep alone.

Source: diffusers, LongCatImageTransformer2DModel.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from vivace.machinery.fused.calls import cast_inputs, cast_last
from vivace.machinery.fused.forms import FusedForm, FusedTransformer, Fusing
from vivace.machinery.fused.hoisted_blocks import FirstBlock, FirstNorm, HoistedBlocks, HoistedForward
from vivace.machinery.fused.models.flux import FLUX


class LongCatForward(HoistedForward):
    """Replaces a transformer's forward; the embedders, the last norm and projection stay diffusers'."""

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
        image = transformer.x_embedder(hidden_states)
        text = transformer.context_embedder(encoder_hidden_states)
        conditions, embedding = self.inputs_of(timestep, None, None, dtype)
        rope = self._blocks.rope(torch.cat([txt_ids, img_ids]))
        image = self._blocks(text, image, rope, self._modulations(conditions, embedding))
        image = self._predicted(image, embedding, dtype)
        return Transformer2DModelOutput(sample=image) if return_dict else (image,)

    def inputs_of(
        self, timestep: torch.Tensor, _: None, __: None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys of the table of modulations (batch, 1), and the embeddings (batch, channels)."""
        timestep = timestep.to(dtype)
        return timestep[:, None].float(), self._transformer.time_embed(timestep * 1000, torch.bfloat16)


def _fuse(transformer: Any, pipe: Any, how: Fusing) -> FusedTransformer:
    cast_inputs(cast_last, transformer.x_embedder, transformer.context_embedder)
    fused = HoistedBlocks(transformer, FLUX, 1, how)
    transformer.transformer_blocks.append(FirstBlock(FirstNorm(fused.modulations)))
    return fused.hoist(transformer, pipe, LongCatForward(transformer, fused), reads_text=False)


FORM = FusedForm(("transformer_blocks", "single_transformer_blocks"), _fuse)
