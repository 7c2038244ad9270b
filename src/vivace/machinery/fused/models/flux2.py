"""FLUX.2's transformer over fused weights: blocks of a kind share their modulations, MLPs have SwiGLU, no layer a bias.

Its modulations are 15 vectors, from layers of 0.14 (klein 4B) to 0.57 (dev) billion weights, which stay diffusers' own:
computing them in each step takes 0.3 % of it.
Source: diffusers, Flux2Transformer2DModel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModelOutput

from vivace.architectures import pipeline_named
from vivace.machinery.compilation.captured import never_written_again
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


@dataclass
class KeptSources:
    """What the pipeline holds between steps: see `SourceKeys.end`."""

    tensors: tuple[torch.Tensor, ...]

    def clear(self) -> None:
        self.tensors = ()


class Flux2Forward(FusedForward):
    """Replaces a transformer's forward; the embedders, the modulations, the last norm and projection stay diffusers'.

    Source images of [klein] 9B KV attend to themselves alone, and are modulated by a fixed timestep. So their keys and
    values are those of a forward without text and noisy image, and all steps are alike: `later_step`, which what
    captures it may replace.
    """

    later_step: Callable[..., torch.Tensor]

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
        kv_cache: KeptSources | None = None,
        kv_cache_mode: str | None = None,
        num_ref_tokens: int = 0,
        ref_fixed_timestep: float = 0.0,
    ) -> Any:
        refuse_extras(joint_attention_kwargs)
        compute = getattr(self, "later_step", self.compute)
        if kv_cache_mode == "extract" and num_ref_tokens:
            sources, hidden_states = hidden_states.tensor_split([num_ref_tokens], dim=1)
            positions, img_ids = img_ids.tensor_split([num_ref_tokens], dim=-2)
            fixed = torch.full_like(timestep, ref_fixed_timestep)
            kv_cache = KeptSources(self._keep(sources, positions, fixed, guidance))
        if kv_cache is None:
            image = compute(hidden_states, encoder_hidden_states, timestep, img_ids, txt_ids, guidance)
        else:
            # The first step's are parts of other tensors; with the same strides and dtypes all steps share a graph.
            hidden_states, img_ids = (
                part.clone(memory_format=torch.contiguous_format) for part in (hidden_states, img_ids)
            )
            times = timestep.to(hidden_states.dtype)
            image = compute(
                hidden_states, encoder_hidden_states, times, img_ids, txt_ids, guidance, kv_cache.tensors
            )
        if kv_cache_mode == "extract" and not return_dict:
            return image, kv_cache
        return Flux2Transformer2DModelOutput(sample=image, kv_cache=kv_cache) if return_dict else (image,)

    def compute(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        img_ids: torch.Tensor,
        txt_ids: torch.Tensor,
        guidance: torch.Tensor | None,
        kept: tuple[torch.Tensor, ...] | None = None,
    ) -> torch.Tensor:
        """Return what a step predicts of the image, which attends to source images if keys and values are `kept`."""
        transformer, dtype = self._transformer, hidden_states.dtype
        image = transformer.x_embedder(hidden_states)
        text = transformer.context_embedder(encoder_hidden_states)
        embedding, modulations = self._modulate(timestep, guidance, dtype)
        ids = torch.cat([of_image(txt_ids), of_image(img_ids)])
        if kept is not None:
            self.source_keys.begin(0, kept)
        image = self._blocks(text, image, self._blocks.rope(ids), modulations)
        if kept is not None:
            self.source_keys.end()
        return self._predicted(image, embedding, dtype)

    def _keep(
        self,
        sources: torch.Tensor,
        positions: torch.Tensor,
        timestep: torch.Tensor,
        guidance: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """Return what is kept of source images (batch, tokens, channels), which attend to themselves."""
        image = self._transformer.x_embedder(sources)
        _, modulations = self._modulate(timestep, guidance, sources.dtype)
        self.source_keys.begin(sources.shape[1])
        self._blocks(image[:, :0], image, self._blocks.rope(of_image(positions)), modulations)
        return tuple(never_written_again(tensor) for tensor in self.source_keys.end())

    def _modulate(
        self, timestep: torch.Tensor, guidance: torch.Tensor | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the timestep's embedding (batch, channels), and the vectors of all modulations (batch, vectors *
        channels)."""
        scale = None if guidance is None else guidance.to(dtype) * 1000
        embedding = self._transformer.time_guidance_embed(timestep.to(dtype) * 1000, scale)
        return embedding, torch.cat([modulate(embedding) for modulate in self._modulations()], dim=1)

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
    known = pipeline_named(type(pipe).__name__)
    if known is not None and known.keeps_sources:
        forward.later_step = forward.compute
    return FusedTransformer(fused, lambda: forward.num_calls)


FORM = FusedForm(("transformer_blocks", "single_transformer_blocks"), _fuse)
