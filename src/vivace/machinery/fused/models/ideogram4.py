"""Ideogram 4's blocks over fused weights: Z-Image's, whose rotary embedding turns a head's first half with its second.

The pipeline pads a text to 2048 tokens in front of it. What no image of a batch attends to is left out before the
forward: see `DroppedTokens`. The transformer that guides is another one, and stays diffusers'.
Source: diffusers, Ideogram4Transformer2DModel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vivace.errors import Unsupported
from vivace.machinery.fused.block_weights import BlockLayers, paired
from vivace.machinery.fused.calls import (
    TensorValueCache,
    cast_all,
    cast_all_named,
    cast_inputs,
    refuse_extras,
)
from vivace.machinery.fused.chain import take_blocks
from vivace.machinery.fused.forms import FusedForm, FusedTransformer, Fusing
from vivace.machinery.fused.lora_columns import name_layers
from vivace.machinery.fused.models.z_image import SANDWICH, SandwichChain

_PADDING = -1
"""The segment of padding."""
_OF_TOKENS = ("hidden_states", "encoder_hidden_states", "position_ids", "segment_ids", "indicator")
"""Arguments of a value for each token, (batch, tokens, ...); the last three are the same in each step."""


def _layers(block: Any) -> BlockLayers:
    attention, mlp = block.attention, block.feed_forward
    heads = attention.num_heads
    return BlockLayers(
        qkv=[[paired(attention.to_q, heads), paired(attention.to_k, heads), attention.to_v]],
        out=[[attention.to_out[0]]],
        up=[[mlp.w1, mlp.w3]],
        down=[[mlp.w2]],
        norms=[(paired(attention.norm_q, 1), paired(attention.norm_k, 1))],
    )


class IdeogramChain(SandwichChain):
    @property
    def adaln_modulation(self) -> nn.Module:
        return self.first_modulation

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor],
        adaln_input: torch.Tensor,
    ) -> torch.Tensor:
        """Return the tokens behind the last block, (batch, tokens, channels). Arguments are those of a block."""
        if adaln_input.shape[1] != 1:
            raise Unsupported(
                "fused: the fused blocks modulate all tokens of an image alike, and this call has a timestep for each; "
                "leave fused out"
            )
        batch, half = len(hidden_states), image_rotary_emb[0].shape[-1] // 2
        angles = (table[..., :half].float().contiguous() for table in image_rotary_emb)
        cos, sin = (table[0] if batch == 1 else table for table in angles)
        # Of one image all tokens that are left attend to each other: see `DroppedTokens`.
        mask = None if batch == 1 else attention_mask
        return self.over_stream(hidden_states, self.vectors(adaln_input[:, 0], batch), (cos, sin), mask)


class DroppedTokens:
    """Hooks around the forward: tokens that are padding in all rows of a batch are left out, zeros in the output."""

    def __init__(self) -> None:
        self.num_dropped = 0
        self._of = TensorValueCache(_without_padding)
        self._kept: torch.Tensor | None = None
        self._length = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": None}

    def before(
        self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        refuse_extras(kwargs.get("attention_kwargs"))
        segments = kwargs["segment_ids"]
        self._kept = None
        if segments.is_meta:  # any length may be; the longest is predicted
            return args, kwargs
        kept, same = self._of(segments, kwargs)
        self._length, self.num_dropped = segments.shape[1], segments.shape[1] - len(kept)
        if not self.num_dropped:
            return args, kwargs
        self._kept = kept
        own = {name: kwargs[name].index_select(1, kept) for name in _OF_TOKENS[:2]}
        return args, kwargs | own | same

    def after(self, _: Any, __: Any, ___: Any, output: Any) -> Any:
        if self._kept is None:
            return output
        if isinstance(output, tuple):
            return (self._whole(output[0]), *output[1:])
        output.sample = self._whole(output.sample)
        return output

    def _whole(self, sample: torch.Tensor) -> torch.Tensor:
        assert self._kept is not None
        made = sample.new_zeros((len(sample), self._length, sample.shape[2]))
        return made.index_copy_(1, self._kept, sample)


def _without_padding(
    segments: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return which tokens any row has, and what is the same in each step of these."""
    kept = (segments != _PADDING).any(dim=0).nonzero()[:, 0]
    same = {name: kwargs[name].index_select(1, kept) for name in _OF_TOKENS[2:]}
    left = same["segment_ids"]
    if len(left) == 1 and not bool((left == left[:, :1]).all()):
        raise Unsupported(
            "fused: several images in one row (segment_ids) have no fused form; leave fused out"
        )
    return kept, same


def _in_own_dtype(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs | {"timestep": kwargs["timestep"].to(module.dtype)}


def _fuse(transformer: Any, pipe: Any, how: Fusing) -> FusedTransformer:
    name_layers(transformer)
    dropped = DroppedTokens()
    transformer.register_forward_pre_hook(dropped.before, with_kwargs=True)
    transformer.register_forward_hook(dropped.after, with_kwargs=True)
    cast_inputs(cast_all, transformer.input_proj, transformer.llm_cond_norm, transformer.t_embedding.mlp_in)
    transformer.final_layer.register_forward_pre_hook(cast_all_named, with_kwargs=True)
    if (other := getattr(pipe, "unconditional_transformer", None)) is not None:
        # The pipeline gives both the timestep in the first one's dtype, which is bf16 now.
        other.register_forward_pre_hook(_in_own_dtype, with_kwargs=True)
    blocks = [*transformer.layers]
    modulations = [block.adaln_modulation for block in blocks]
    heads = transformer.config.num_attention_heads
    form = replace(SANDWICH, layers=_layers)
    chain = IdeogramChain(blocks, form, heads, modulations, how)
    take_blocks(transformer, "layers", chain)
    counts = {"denoiser.padding_left_out": lambda: dropped.num_dropped}
    return FusedTransformer(True, lambda: chain.num_calls, counts)


# In bf16 frequencies would give tokens other places.
FORM = FusedForm(("layers",), _fuse, exact=("rotary_emb.inv_freq",))
