"""Krea 2's blocks over fused weights: one stream, RMSNorm, one modulation for all, grouped heads, gated attention.

A chain of all blocks takes the place of diffusers' list. Keys and values have a fourth of the queries' heads, and
attention's output is multiplied by a sigmoid of a fourth projection of its input. All else stays diffusers': the fusion
of the text's states, embedders, positions, the last layer. What the pipeline pads a text with is left out before the
forward: see `DroppedPadding`.
Source: diffusers, Krea2Transformer2DModel.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from vivace.machinery.fused import operations
from vivace.machinery.fused.block_attention import attend
from vivace.machinery.fused.block_weights import BlockLayers, BlockWeights, projections
from vivace.machinery.fused.casts import cast_all, cast_last
from vivace.machinery.fused.chain import take_over
from vivace.machinery.fused.lora_columns import name_layers
from vivace.machinery.fused.operations import AttentionPreparation, Places, Rows
from vivace.machinery.fused.refusals import refuse_extras
from vivace.machinery.fused.scales import GROWTH, spread
from vivace.machinery.kernels.reference import Branch, Modulation, TokenLayout, scale_of

_VECTORS = 6
"""Of a block: scale, shift and gate of attention, then of the MLP."""
_TEXTS = 2
"""Masks that are remembered: of guidance's two calls."""


# Krea 2's pipeline pads every text to 512 tokens and masks the rest in all attention, so that nothing depends on it.
# Left out, a step has fewer tokens, and no mask, which attention in e4m3 does not take.
class DroppedPadding:
    """A hook in front of the forward. Tokens that are masked in all rows of a batch are left out.

    Which these are is read from the device once for each mask, not in each step.

    Attributes:
        num_dropped: tokens that the last call had fewer.
    """

    def __init__(self) -> None:
        self.num_dropped = 0
        self._seen: list[tuple[torch.Tensor, int, torch.Tensor, bool]] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the transformer in another process begins anew."""
        return self.__dict__ | {"_seen": []}

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
        self.num_dropped = num_words - len(kept)
        positions = kwargs["position_ids"]
        return args, kwargs | {
            "encoder_hidden_states": kwargs["encoder_hidden_states"].index_select(1, kept),
            "encoder_attention_mask": None if is_whole else mask.index_select(1, kept),
            "position_ids": torch.cat([positions[:num_words].index_select(0, kept), positions[num_words:]]),
        }

    def _kept(self, mask: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return which tokens any row has, and whether all rows have these."""
        for seen, version, kept, is_whole in self._seen:
            if seen is mask and version == mask._version:
                return kept, is_whole
        kept = mask.bool().any(dim=0).nonzero()[:, 0]
        is_whole = bool(mask.index_select(1, kept).all())
        self._seen = [*self._seen[1 - _TEXTS :], (mask, mask._version, kept, is_whole)]
        return kept, is_whole


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


class ModulatedChain(nn.Module):
    """All blocks.

    Args:
        blocks: diffusers'.
        bounded: for each block, whether attention's inputs are to be bounded, for fp8.

    Attributes:
        takes_layers: diffusers' layers are not its own modules, but slots of its products.
        norm1, scale_shift_table: the first block's, by whose output step caches decide.
        tables: what each block adds to the modulation, (blocks, 6, channels).
        norms: what is multiplied by the norms of attention's and the MLP's inputs, (blocks, 2, channels).
        num_calls: of its forward.
    """

    takes_layers = True

    def __init__(
        self, blocks: Sequence[Any], quantize: bool, bounded: Sequence[bool], places: Places
    ) -> None:
        super().__init__()
        self.num_calls = 0
        attention = blocks[0].attn
        self._num_heads, self._num_key_heads = attention.num_heads, attention.num_kv_heads
        self._values_at = (self._num_heads + self._num_key_heads) * attention.head_dim
        self._gate_at = self._values_at + self._num_key_heads * attention.head_dim
        self._eps, self._eps_of_heads = blocks[0].norm1.eps, attention.norm_q.eps
        self.norm1, self.scale_shift_table = blocks[0].norm1, blocks[0].scale_shift_table
        tables = torch.stack([block.scale_shift_table for block in blocks])
        norms = torch.stack([torch.stack([block.norm1.weight, block.norm2.weight]) for block in blocks])
        self.register_buffer("tables", tables.detach().float().to(places.home))
        self.register_buffer("norms", norms.detach().float().to(places.home) + 1)
        take_over(
            self,
            zip(blocks, bounded, strict=True),
            ("attn", "ff"),
            lambda block, is_bounded: self._weights_of(block, quantize, is_bounded),
            places,
        )

    def _weights_of(
        self, block: Any, quantize: bool, bounded: bool
    ) -> tuple[BlockWeights, torch.Tensor | None]:
        weights = BlockWeights(_layers(block), "swiglu", quantize, bounded)
        if not quantize:
            return weights, None
        assert weights.qkv.scale is not None
        own = weights.qkv.weight[0, self._values_at : self._gate_at].float() * weights.qkv.scale
        return weights, own.norm(dim=1).amax()

    def forward(
        self,
        hidden_states: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the tokens behind the last block, (batch, tokens, channels). Arguments are those of a block."""
        self.num_calls += 1
        batch, length, channels = hidden_states.shape
        rows = hidden_states.to(torch.bfloat16, copy=True).flatten(0, 1).contiguous()
        tokens = TokenLayout(batch, 0, length)
        cos, sin = (angles[:, ::2].float().contiguous() for angles in image_rotary_emb)
        mask = None if attention_mask is None else attention_mask[:, 0, 0]
        vectors = self._vectors(temb)
        inputs, values = self._scales(vectors)
        flat = vectors.flatten(1)
        unit = None if self.unit is None else self.unit[:1]
        pending: Branch | None = None
        for index, block in enumerate(self.blocks):
            starts = [(index * _VECTORS + vector) * channels for vector in range(_VECTORS)]
            scale, shift, gate, mlp_scale, mlp_shift, mlp_gate = (Modulation(at, at) for at in starts)
            normed = self._norm(rows, pending, flat, (shift, scale), tokens, inputs[index][0], block.qkv.room)
            attended = self._attend(block, normed, (cos, sin), tokens, values[index], mask)
            branch = Branch(block.out(attended, tokens), gate)
            normed = self._norm(
                rows, branch, flat, (mlp_shift, mlp_scale), tokens, inputs[index][1], block.up.room
            )
            active = operations.swiglu(block.up(normed, tokens), unit is not None, room=block.down.room)
            made = block.down(Rows(active.values, unit), tokens)
            pending = Branch(made, mlp_gate, row_scales=active.scales)
        self._norm(rows, pending, flat, None, tokens, None)
        return rows.unflatten(0, (batch, length))

    def _norm(
        self,
        rows: torch.Tensor,
        branch: Branch | None,
        vectors: torch.Tensor,
        norm: tuple[Modulation, Modulation] | None,
        tokens: TokenLayout,
        scale: torch.Tensor | None,
        room: operations.Room | None = None,
    ) -> Rows:
        return operations.add_and_norm(
            rows, branch, vectors, norm, tokens, scale, self._eps, room, centred=False
        )

    def _vectors(self, temb: torch.Tensor) -> torch.Tensor:
        """Return the vectors of all blocks, (batch, blocks, 6, channels), in fp32.

        A norm's own weight and a block's scale are one: 1 + scale is (1 + what modulates) times the weight.
        """
        vectors = temb.float().unflatten(-1, (1, _VECTORS, -1))[:, 0] + self.tables
        vectors[:, :, ::3] = (1 + vectors[:, :, ::3]) * self.norms - 1
        return vectors

    def _scales(self, vectors: torch.Tensor) -> tuple[Any, Any]:
        """Return the scales of the products' inputs (blocks, 2, 1), and of values with their inverse (blocks, 2).

        A normalised token of n channels has the norm sqrt(n): see `vivace.machinery.fused.scales`.
        """
        if self.largest is None:
            return [(None, None)] * len(self.blocks), [None] * len(self.blocks)
        reach = vectors.shape[-1] ** 0.5 * (1 + vectors[:, :, ::3]).abs().amax(dim=-1)
        shifts = vectors[:, :, 1::3]
        inputs = spread(scale_of((reach + shifts.abs().amax(dim=-1)).amax(dim=0)))[..., :1]
        length = (reach[:, :, 0] + shifts[:, :, 0].norm(dim=-1)).amax(dim=0)
        values = scale_of(length * self.largest * GROWTH)
        return inputs, spread(torch.stack([values, 1 / values], dim=1))[..., 0]

    def _attend(
        self,
        block: BlockWeights,
        rows: Rows,
        rope: tuple[torch.Tensor, torch.Tensor],
        tokens: TokenLayout,
        of_values: torch.Tensor | None,
        mask: torch.Tensor | None,
    ) -> Rows:
        scales = block.norms.attention_scales(of_values, is_bf16=mask is not None)
        preparation = AttentionPreparation(
            None,
            block.norms.weight,
            rope,
            tokens,
            self._num_heads,
            scales,
            self._eps_of_heads,
            self._num_key_heads,
        )
        projected = block.qkv(rows, tokens)
        attended = attend(
            operations.attention_inputs(projected, preparation), scales, tokens, None, mask=mask
        )
        scale = None if of_values is None else of_values[:1]
        return operations.sigmoid_gated(attended, projected[:, self._gate_at :], scale, block.out.room)


def fuse_krea2(
    transformer: Any, quantize: bool, bounded: tuple[bool, ...], places: Places
) -> tuple[ModulatedChain, DroppedPadding]:
    """Replace a transformer's blocks by a chain, the only element of their list.

    Args:
        quantize: store weights in e4m3, with one scale for each; else in bf16.
        bounded: for each block, whether attention's inputs are to be bounded, for fp8.
        places: where the model computes, and where its weights are kept.
    """
    name_layers(transformer)
    dropped = DroppedPadding()
    transformer.register_forward_pre_hook(dropped, with_kwargs=True)
    transformer.img_in.register_forward_pre_hook(cast_last)
    transformer.text_fusion.register_forward_pre_hook(cast_all)
    transformer.time_embed.register_forward_pre_hook(_in_bf16, with_kwargs=True)
    chain = ModulatedChain([*transformer.transformer_blocks], quantize, bounded, places)
    transformer.transformer_blocks = nn.ModuleList([chain.eval().requires_grad_(False)])
    return chain, dropped


def _in_bf16(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Embed the time in bf16, whatever the latents are in."""
    return args, kwargs | {"dtype": torch.bfloat16}
