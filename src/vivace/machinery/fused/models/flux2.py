"""FLUX.2's transformer over fused weights: blocks of a kind share their modulations, MLPs have SwiGLU, no layer a bias.

Its modulations are 15 vectors, from layers of 0.14 (klein 4B) to 0.57 (dev) billion weights, which stay diffusers' own:
computing them in each step takes 0.3 % of it.
Source: diffusers, Flux2Transformer2DModel.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModelOutput

from vivace.errors import Unsupported
from vivace.machinery.fused.block_forward import FusedForward
from vivace.machinery.fused.block_weights import (
    BlockLayers,
    FusedArchitecture,
    FusedBlocks,
    of_image,
    projections,
)
from vivace.machinery.fused.calls import cast_inputs, cast_last, refuse_extras
from vivace.machinery.fused.forms import FusedForm, FusedTransformer, Fusing
from vivace.machinery.fused.hoisted_blocks import FirstBlock


def _double(block: Any) -> BlockLayers:
    attn = block.attn
    return BlockLayers(
        qkv=[projections(attn, "text"), projections(attn, "image")],
        out=[[attn.to_add_out], [attn.to_out[0]]],
        up=[[block.ff_context.linear_in], [block.ff.linear_in]],
        down=[[block.ff_context.linear_out], [block.ff.linear_out]],
        norms=[(attn.norm_added_q, attn.norm_added_k), (attn.norm_q, attn.norm_k)],
    )


def _single(block: Any) -> BlockLayers:
    attn = block.attn
    return BlockLayers(
        qkv=[[attn.to_qkv_mlp_proj]],
        out=[[attn.to_out]],
        up=None,
        down=None,
        norms=[(attn.norm_q, attn.norm_k)],
    )


FLUX2 = FusedArchitecture("swiglu", _double, _single, shares_modulations=True)


class Flux2Forward(FusedForward):
    """Replaces a transformer's forward; the embedders, the modulations, the last norm and projection stay
    diffusers'."""

    def __call__(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        img_ids: torch.Tensor,
        txt_ids: torch.Tensor,
        guidance: torch.Tensor | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
        kv_cache: Any = None,
        kv_cache_mode: str | None = None,
        num_ref_tokens: int = 0,
        ref_fixed_timestep: float = 0.0,
    ) -> Any:
        if kv_cache is not None or kv_cache_mode is not None:
            raise Unsupported(
                "fused: the fused blocks keep no keys and values of reference images (kv_cache); leave fused out, or "
                "use Flux2KleinPipeline, which computes them in each step"
            )
        refuse_extras(joint_attention_kwargs)
        transformer, dtype = self._transformer, hidden_states.dtype
        image = transformer.x_embedder(hidden_states)
        text = transformer.context_embedder(encoder_hidden_states)
        scale = None if guidance is None else guidance.to(dtype) * 1000
        embedding = transformer.time_guidance_embed(timestep.to(dtype) * 1000, scale)
        modulations = torch.cat([modulate(embedding) for modulate in self._modulations()], dim=1)
        ids = torch.cat([of_image(txt_ids), of_image(img_ids)])
        image = self._blocks(text, image, self._blocks.rope(ids), modulations)
        image = self._predicted(image, embedding, dtype)
        return Flux2Transformer2DModelOutput(sample=image) if return_dict else (image,)

    def _modulations(self) -> tuple[Any, ...]:
        """In the order of `FusedArchitecture`: of double blocks the image's, then the text's; of single blocks."""
        of = self._transformer
        return of.double_stream_modulation_img, of.double_stream_modulation_txt, of.single_stream_modulation


def _fuse(transformer: Any, pipe: Any, how: Fusing) -> FusedTransformer:
    embed = transformer.time_guidance_embed
    embedders = (
        transformer.x_embedder,
        transformer.context_embedder,
        embed.timestep_embedder,
        embed.guidance_embedder,
    )
    cast_inputs(cast_last, *embedders)
    first = transformer.transformer_blocks[0].norm1 if len(transformer.transformer_blocks) else None
    fused = FusedBlocks(transformer, FLUX2, how)
    if first is not None:
        transformer.transformer_blocks.append(FirstBlock(first))
    transformer.forward = forward = Flux2Forward(transformer, fused)
    return FusedTransformer(fused, lambda: forward.num_calls)


FORM = FusedForm(("transformer_blocks", "single_transformer_blocks"), _fuse)
