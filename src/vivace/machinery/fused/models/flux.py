"""FLUX.1's transformer over fused weights: each block has modulations of its own, and MLPs have GELU.

Source: diffusers, FluxTransformer2DModel.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from vivace.machinery.fused.block_forward import Exchange
from vivace.machinery.fused.block_weights import BlockLayers, FusedArchitecture, of_image, projections
from vivace.machinery.fused.calls import cast_inputs, cast_last, refuse_controlnet, refuse_extras
from vivace.machinery.fused.forms import FusedForm, FusedTransformer, Fusing
from vivace.machinery.fused.hoisted_blocks import FirstBlock, FirstNorm, HoistedBlocks, HoistedForward


def _double(block: Any) -> BlockLayers:
    attn = block.attn
    return BlockLayers(
        qkv=[projections(attn, "text"), projections(attn, "image")],
        out=[[attn.to_add_out], [attn.to_out[0]]],
        up=[[block.ff_context.net[0].proj], [block.ff.net[0].proj]],
        down=[[block.ff_context.net[2]], [block.ff.net[2]]],
        norms=[(attn.norm_added_q, attn.norm_added_k), (attn.norm_q, attn.norm_k)],
    )


def _single(block: Any) -> BlockLayers:
    attn = block.attn
    return BlockLayers(
        qkv=[projections(attn, "image")],
        out=[[block.proj_out]],
        up=[[block.proj_mlp]],
        down=None,
        norms=[(attn.norm_q, attn.norm_k)],
    )


def _modulations(block: Any) -> list[Any]:
    norms = (block.norm1, block.norm1_context) if hasattr(block, "norm1") else (block.norm,)
    return [norm.linear for norm in norms]


FLUX = FusedArchitecture("gelu", _double, _single, _modulations)


class FluxForward(HoistedForward):
    """Replaces a transformer's forward; the embedders, the last norm and projection stay diffusers'."""

    @property
    def exchange(self) -> Exchange | None:
        return self._blocks.exchange

    @exchange.setter
    def exchange(self, exchange: Exchange) -> None:
        self._blocks.exchange = exchange

    def __call__(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        pooled_projections: torch.Tensor,
        timestep: torch.Tensor,
        img_ids: torch.Tensor,
        txt_ids: torch.Tensor,
        guidance: torch.Tensor | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        controlnet_block_samples: Any = None,
        controlnet_single_block_samples: Any = None,
        return_dict: bool = True,
        controlnet_blocks_repeat: bool = False,
    ) -> Any:
        refuse_controlnet(controlnet_block_samples, controlnet_single_block_samples)
        refuse_extras(joint_attention_kwargs)
        transformer = self._transformer
        image = transformer.x_embedder(hidden_states.bfloat16())
        text = transformer.context_embedder(encoder_hidden_states.bfloat16())
        conditions, embedding = self.inputs_of(timestep, guidance, pooled_projections, hidden_states.dtype)
        ids = torch.cat([of_image(txt_ids), of_image(img_ids)])
        rope = self._blocks.rope(ids)
        image = self._blocks(text, image, rope, self._modulate(conditions, embedding))
        image = self._predicted(image, embedding, hidden_states.dtype)
        return Transformer2DModelOutput(sample=image) if return_dict else (image,)

    def inputs_of(
        self,
        timestep: torch.Tensor,
        guidance: torch.Tensor | None,
        pooled: torch.Tensor,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys of the table of modulations (batch, inputs), and the embeddings (batch, channels)."""
        timestep = timestep.to(dtype)
        pooled = pooled.bfloat16()
        embed = self._transformer.time_text_embed
        if guidance is None:
            embedding = embed(timestep * 1000, pooled)
            scale = torch.zeros_like(timestep)
        else:
            scale = guidance.to(dtype)
            embedding = embed(timestep * 1000, scale * 1000, pooled)
        conditions = torch.cat([timestep[:, None].float(), scale[:, None].float(), pooled.float()], dim=1)
        return conditions, embedding

    def _modulate(self, conditions: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        modulations = self._modulations
        if self.exchange is None:
            return modulations(conditions, embedding)
        like = modulations.bias.expand(len(conditions), -1)
        return self.exchange.modulations(lambda: modulations(conditions, embedding), like)


def _fuse(transformer: Any, pipe: Any, how: Fusing) -> FusedTransformer:
    cast_inputs(cast_last, transformer.x_embedder, transformer.context_embedder, transformer.time_text_embed)
    has_doubles = len(transformer.transformer_blocks) > 0
    num_inputs = 2 + transformer.config.pooled_projection_dim
    fused = HoistedBlocks(transformer, FLUX, num_inputs, how)
    if has_doubles:
        transformer.transformer_blocks.append(FirstBlock(FirstNorm(fused.modulations)))
    return fused.hoist(transformer, pipe, FluxForward(transformer, fused))


FORM = FusedForm(("transformer_blocks", "single_transformer_blocks"), _fuse)
