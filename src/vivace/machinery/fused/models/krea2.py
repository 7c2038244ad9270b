"""Krea 2's blocks over fused weights: one stream, RMSNorm, one modulation for all, grouped heads, gated attention.

Keys and values have a fourth of the queries' heads, and attention's output is multiplied by a sigmoid of a fourth
projection of its input. What the pipeline pads a text with is left out before the forward: see `DroppedPadding`.
Source: diffusers, Krea2Transformer2DModel.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from vivace.machinery.compilation.prompt_lengths import padded_length
from vivace.machinery.fused.block_weights import BlockLayers, projections
from vivace.machinery.fused.calls import TensorValueCache, cast_all, cast_inputs, cast_last, refuse_extras
from vivace.machinery.fused.chain import BlockChain, ChainForm, take_blocks
from vivace.machinery.fused.forms import FusedForm, FusedTransformer, Fusing
from vivace.machinery.fused.lora_columns import name_layers


# Krea 2's pipeline pads every text to 512 tokens and masks the rest in all attention, so that nothing depends on it.
# Left out, a step has fewer tokens, and no mask, which attention in e4m3 does not take. There some of it
# stays, so that texts of other lengths share plans and graphs: attention is told on the GPU how many tokens there are.
class DroppedPadding:
    """A hook in front of the forward: tokens that are masked in all rows of a batch are left out."""

    def __init__(self, pads: bool) -> None:
        self.num_dropped = 0
        self._pads = pads
        self._kept = TensorValueCache(_kept)

    def __call__(
        self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        refuse_extras(kwargs.get("attention_kwargs"))
        mask = kwargs.get("encoder_attention_mask")
        if mask is None:
            return args, kwargs
        if mask.is_meta:  # any length may be; the longest is predicted
            return args, kwargs | {"encoder_attention_mask": None}
        kept, is_whole = self._kept(mask)
        num_words = mask.shape[1]
        text, mask = (each.index_select(1, kept) for each in (kwargs["encoder_hidden_states"], mask))
        positions = kwargs["position_ids"]
        of_text = positions[:num_words].index_select(0, kept)
        if self._pads:
            more = min(num_words, padded_length(len(kept))) - len(kept)
            text = nn.functional.pad(text, (0, 0, 0, 0, 0, more))
            mask, of_text = nn.functional.pad(mask, (0, more)), nn.functional.pad(of_text, (0, 0, 0, more))
        self.num_dropped = num_words - text.shape[1]
        return args, kwargs | {
            "encoder_hidden_states": text,
            "encoder_attention_mask": None if is_whole and not self._pads else mask,
            "position_ids": torch.cat([of_text, positions[num_words:]]),
        }


def _kept(mask: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Return which tokens any row has, and whether all rows have these."""
    kept = mask.bool().any(dim=0).nonzero()[:, 0]
    return kept, bool(mask.index_select(1, kept).all())


def _layers(block: Any) -> BlockLayers:
    attention, mlp = block.attn, block.ff
    of_queries, of_keys = (
        SimpleNamespace(weight=norm.weight + 1) for norm in (attention.norm_q, attention.norm_k)
    )
    return BlockLayers(
        qkv=[[*projections(attention, "image"), attention.to_gate]],
        out=[[attention.to_out[0]]],
        up=[[mlp.gate, mlp.up]],
        down=[[mlp.down]],
        norms=[(of_queries, of_keys)],
    )


KREA2 = ChainForm(_layers, ("attn", "ff"), "rms", ("scale", "shift", "gate"), gates_attention=True)


class ModulatedChain(BlockChain):
    """All blocks; step caches decide by the first one's norm1 and scale_shift_table. `tables` are added to the
    modulation, (blocks, 6, channels); `norms` are the weights of two norms of each block, (blocks, 2, channels)."""

    def __init__(self, blocks: Sequence[Any], how: Fusing) -> None:
        first, attention = blocks[0], blocks[0].attn
        heads = attention.num_heads, attention.num_kv_heads
        eps = first.norm1.eps, attention.norm_q.eps
        super().__init__(blocks, KREA2, heads, eps, how)
        self.norm1, self.scale_shift_table = first.norm1, first.scale_shift_table
        tables = torch.stack([block.scale_shift_table for block in blocks])
        norms = torch.stack([torch.stack([block.norm1.weight, block.norm2.weight]) for block in blocks])
        self.register_buffer("tables", tables.detach().float().to(how.places.home))
        self.register_buffer("norms", norms.detach().float().to(how.places.home) + 1)

    def forward(
        self,
        hidden_states: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the tokens behind the last block, (batch, tokens, channels). Arguments are those of a block."""
        cos, sin = (angles[:, ::2].float().contiguous() for angles in image_rotary_emb)
        mask = None if attention_mask is None else attention_mask[:, 0, 0]
        vectors = self._vectors(temb)
        if mask is None or not self.pads:
            return self.over_stream(hidden_states, vectors, (cos, sin), mask)
        # What is not attended to is put behind all other tokens, and back where it was.
        order = mask.logical_not().to(torch.uint8).sort(dim=1, stable=True).indices
        cos, sin = (angles[order[0] if len(order) == 1 else order] for angles in (cos, sin))
        x = hidden_states.take_along_dim(order[:, :, None], dim=1)
        made = self.over_stream(x, vectors, (cos, sin), None, mask.sum(dim=1, dtype=torch.int32))
        return made.take_along_dim(order.argsort(dim=1)[:, :, None], dim=1)

    def _vectors(self, temb: torch.Tensor) -> torch.Tensor:
        """Return the vectors of all blocks, (batch, blocks, 6, channels), in fp32, with the norms' weights in the
        scales."""
        vectors = temb.float().unflatten(-1, (1, self.tables.shape[1], -1))[:, 0] + self.tables
        vectors[:, :, ::3] = (1 + vectors[:, :, ::3]) * self.norms - 1
        return vectors


def _fuse(transformer: Any, pipe: Any, how: Fusing) -> FusedTransformer:
    name_layers(transformer)
    cast_inputs(cast_last, transformer.img_in)
    cast_inputs(cast_all, transformer.text_fusion)
    transformer.time_embed.register_forward_pre_hook(_in_bf16, with_kwargs=True)
    chain = ModulatedChain([*transformer.transformer_blocks], how)
    dropped = DroppedPadding(chain.pads)
    transformer.register_forward_pre_hook(dropped, with_kwargs=True)
    take_blocks(transformer, "transformer_blocks", chain)
    evidence = {"denoiser.padding_left_out": lambda: dropped.num_dropped}
    return FusedTransformer(True, lambda: chain.num_calls, evidence)


FORM = FusedForm(("transformer_blocks",), _fuse)


def _in_bf16(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | {"dtype": torch.bfloat16}
