"""ERNIE-Image's blocks over fused weights: one stream, RMSNorm, one modulation for all, GEGLU.

Its rotary embedding turns the first half of a head's channels with the second, each by angles of its own; here such
pairs lie side by side. With attention in fp8 texts are padded to one of a few lengths, which share plans and graphs.
Source: diffusers, ErnieImageTransformer2DModel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vivace.machinery.compilation.prompt_lengths import padded_length
from vivace.machinery.fused.block_weights import BlockLayers, paired
from vivace.machinery.fused.calls import TensorValueCache, cast_all, cast_inputs, cast_last
from vivace.machinery.fused.chain import BlockChain, ChainForm, take_blocks
from vivace.machinery.fused.forms import FusedForm, FusedTransformer, Fusing
from vivace.machinery.fused.lora_columns import name_layers


def _layers(block: Any) -> BlockLayers:
    attention, mlp = block.self_attention, block.mlp
    heads = attention.heads
    return BlockLayers(
        qkv=[[paired(attention.to_q, heads), paired(attention.to_k, heads), attention.to_v]],
        out=[[attention.to_out[0]]],
        up=[[mlp.up_proj, mlp.gate_proj]],
        down=[[mlp.linear_fc2]],
        norms=[(paired(attention.norm_q, 1), paired(attention.norm_k, 1))],
    )


ERNIE = ChainForm(_layers, ("self_attention", "mlp"), "rms", ("shift", "scale", "gate"), activation="geglu")


class ErnieChain(BlockChain):
    """All blocks; `adaLN_sa_ln` is the first one's, by whose output step caches decide, and `norms` the weights of the
    norms of attention's and the MLP's inputs, (blocks, 2, channels)."""

    def __init__(self, blocks: Sequence[Any], how: Fusing) -> None:
        first = blocks[0]
        heads, eps = first.self_attention.heads, (first.adaLN_sa_ln.eps, first.self_attention.norm_q.eps)
        super().__init__(blocks, ERNIE, (heads, heads), eps, how)
        self.adaLN_sa_ln = first.adaLN_sa_ln
        norms = [torch.stack([block.adaLN_sa_ln.weight, block.adaLN_mlp_ln.weight]) for block in blocks]
        self.register_buffer("norms", torch.stack(norms).detach().float().to(how.places.home))

    def forward(
        self,
        x: torch.Tensor,
        rotary_pos_emb: torch.Tensor,
        temb: Sequence[torch.Tensor],
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the tokens behind the last block, (tokens, batch, channels). Arguments are those of a block."""
        angles = rotary_pos_emb[:, :, 0].float()
        rope = angles.cos().contiguous(), angles.sin().contiguous()
        mask = None if attention_mask is None else attention_mask[:, 0, 0]
        num_keys = None
        if mask is not None and self.pads:
            num_keys, mask = mask.sum(dim=1, dtype=torch.int32), None  # the text is behind the image
        elif x.shape[1] == 1:
            mask = None  # one text is as long as its tensor: see `TextTrim`
        vectors = self._vectors(torch.stack([vector[0] for vector in temb], dim=1))
        return self.over_stream(x.transpose(0, 1), vectors, rope, mask, num_keys).transpose(0, 1)

    def _vectors(self, shared: torch.Tensor) -> torch.Tensor:
        """Return the vectors of all blocks, (batch, blocks, 6, channels), in fp32, with the norms' weights in the
        scales."""
        vectors = shared.float()[:, None].repeat(1, len(self.norms), 1, 1)
        vectors[:, :, 1::3] = (1 + vectors[:, :, 1::3]) * self.norms - 1
        return vectors


class TextTrim:
    """A hook in front of the forward: texts are as long as the longest of the batch, so that one text needs no mask, or
    padded to one of a few lengths."""

    def __init__(self, pads: bool) -> None:
        self._pads = pads
        self._longest = TensorValueCache(_largest)

    def __call__(
        self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        text, lengths = kwargs.get("text_bth"), kwargs.get("text_lens")
        if text is None or lengths is None or lengths.is_meta:
            return args, kwargs
        longest = self._longest(lengths)
        more = padded_length(longest) - longest if self._pads else 0
        return args, kwargs | {"text_bth": nn.functional.pad(text[:, :longest], (0, 0, 0, more))}


def _largest(lengths: torch.Tensor) -> int:
    return int(lengths.max())


def _fuse(transformer: Any, pipe: Any, how: Fusing) -> FusedTransformer:
    name_layers(transformer)
    cast_inputs(cast_all, transformer.x_embedder)
    cast_inputs(cast_last, transformer.text_proj, transformer.time_embedding)
    chain = ErnieChain([*transformer.layers], how)
    transformer.register_forward_pre_hook(TextTrim(chain.pads), with_kwargs=True)
    take_blocks(transformer, "layers", chain)
    return FusedTransformer(True, lambda: chain.num_calls)


FORM = FusedForm(("layers",), _fuse)
