"""Qwen-Image 2.1's transformer over fused weights. Its blocks are one stream, with tanh gates and SwiGLU.

diffusers' forward waits for the GPU five times to learn where the image's tokens are, and writes the position of each
token on the host. A step after the first needs none of that: its tokens are the image's, and their positions and mask
are kept with the keys and values. So it goes from the embedder to the blocks at once, and can be captured as a CUDA
graph, which the first step cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.transformer_qwenimage21 import (
    QwenImage21AttnProcessor,
    QwenImage21TransformerBlock,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from vivace.machinery.compilation.captured import never_written_again
from vivace.machinery.compilation.prompt_lengths import padded_length
from vivace.machinery.fused import operations
from vivace.machinery.fused.block_weights import BlockLayers, BlockWeights, projections
from vivace.machinery.fused.calls import cast_inputs, cast_last
from vivace.machinery.fused.chain import BlockChain, ChainForm, Tables, take_blocks
from vivace.machinery.fused.forms import FusedForm, FusedTransformer, Fusing
from vivace.machinery.fused.kept_keys import beside
from vivace.machinery.fused.lora_columns import name_layers
from vivace.machinery.fused.operations import Rows
from vivace.machinery.kernels.reference import TokenLayout, from_joint, to_joint

Segment = tuple[int, int, bool]
"""Where a segment starts and ends, and whether it is text."""


# Attention of the step that computes them goes segment by segment: words attend to all in front of them and to
# themselves, an image's tokens to all of it as well.
@dataclass
class Prefix:
    """The tokens in front of an image.

    Attributes:
        length: its tokens.
        segments: of it; None: it was computed in an earlier step.
        rope: of all tokens that are computed.
        mask: (batch, all tokens), which of them are attended to; None: all. In later steps the image's come first.
        room: how many tokens later steps have keys and values of, with padding behind them; None: without.
        num_keys: of a prefix with padding, in later steps: see `operations.attend`.
        is_kept: whether later steps will need its keys and values.
        keys, values: of each block, (batch, length, heads, channels), in bf16.
    """

    length: int
    segments: list[Segment] | None
    rope: Tables
    mask: torch.Tensor | None
    room: int | None = None
    num_keys: torch.Tensor | None = None
    is_kept: bool = False
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    @property
    def behind(self) -> Prefix:
        """Return the prefix as later steps need it."""
        cos, sin = (angles[self.length :] for angles in self.rope)
        mask, num_keys = self.mask, None
        if mask is not None:
            mask = torch.cat([mask[:, self.length :], mask[:, : self.length]], dim=1)
        if self.room is not None:
            like = self.keys[0]
            counts = torch.full((len(like),), len(self.rope[0]), dtype=torch.int32, device=like.device)
            num_keys = never_written_again(counts)
        length = self.room or self.length
        return Prefix(length, None, (cos, sin), mask, num_keys=num_keys, keys=self.keys, values=self.values)

    @property
    def is_computed(self) -> bool:
        return self.segments is not None

    def keep(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if not self.is_kept:
            return
        for kept, made in ((self.keys, keys), (self.values, values)):
            room = made.new_zeros((len(made), self.room or self.length, *made.shape[2:]))
            room[:, : self.length] = made[:, : self.length]
            kept.append(never_written_again(room))


# cuDNN makes a plan for each number of tokens, which takes longer than the one step that this attention is of. The
# other kernels take any number.
_ANY_LENGTH = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)


def _layers(block: Any) -> BlockLayers:
    attention, mlp = block.attn, block.img_mlp
    return BlockLayers(
        qkv=[projections(attention, "image")],
        out=[[attention.to_out[0]]],
        up=[[mlp.gate_layer, mlp.proj]],
        down=[[mlp.out]],
        norms=[(attention.norm_q, attention.norm_k)],
    )


CAUSAL = ChainForm(_layers, ("attn", "img_mlp"), "layer", ("shift", "scale", "gate"), shares_vectors=True)


# A chain of all blocks takes the place of diffusers' list. Text and images to be edited come before the image that is
# drawn, are modulated by a timestep of 0 and attend to nothing behind them. So their keys and values are those of the
# first step, which computes them block by block of the mask, attention in bf16. Later steps compute the image's tokens
# alone, over keys and values of both; in e4m3 those that are kept are rounded again with the step's scale. Source:
# diffusers, QwenImage21Transformer2DModel.
class CausalChain(BlockChain):
    """All blocks, with the attention that the transformer asks for, and the first norm, by which step caches decide."""

    _modulate = QwenImage21TransformerBlock._modulate

    def __init__(self, blocks: Sequence[Any], num_heads: int, how: Fusing) -> None:
        eps = blocks[0].img_norm1.eps, blocks[0].attn.norm_q.eps
        super().__init__(blocks, CAUSAL, (num_heads, num_heads), eps, how)
        self.attn = SimpleNamespace(processor=QwenImage21AttnProcessor())
        self.img_norm1 = blocks[0].img_norm1

    def forward(
        self,
        hidden_states: torch.Tensor,
        modulation: torch.Tensor,
        rotary_emb: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        target_token_mask: torch.Tensor | None = None,
        layer_cache: Any = None,
        kv_cache_mode: str | None = None,
        cache_write_slice: slice | None = None,
        segments: list[Segment] | None = None,
        key_valid: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the tokens behind the last block; the first one's `layer_cache` has what all keep, a `Prefix`."""
        is_still = target_token_mask is not None
        if segments is None:  # a later step, whose positions and mask are those of the first one
            return self.behind(hidden_states, modulation, layer_cache.get()[0], is_still)
        rope = rotary_emb.real.float().contiguous(), rotary_emb.imag.float().contiguous()
        length = segments[-1][1] if segments else 0
        room = padded_length(length) if self.pads and key_valid is None else None
        prefix = Prefix(length, segments, rope, key_valid, room, is_kept=cache_write_slice is not None)
        made = self.behind(hidden_states, modulation, prefix, is_still)
        if prefix.is_kept:
            layer_cache.store(prefix.behind, prefix.behind)
        return made

    def behind(
        self, x: torch.Tensor, modulation: torch.Tensor, prefix: Prefix, is_still: bool
    ) -> torch.Tensor:
        """Return the tokens behind the last block; `modulation` is (batch, 4 channels), with `is_still` a row more."""
        batch, length, _ = x.shape
        num_first = prefix.length if prefix.is_computed else 0
        tokens = TokenLayout(batch, num_first, length - num_first)
        rows = from_joint(x.to(torch.bfloat16, copy=True), tokens).contiguous()

        def attend(block: BlockWeights, index: int, normed: Rows, of_values: torch.Tensor | None) -> Rows:
            return self._attend_over(prefix, block, index, normed, tokens, of_values)

        self.compute(rows, _vectors(modulation, batch, is_still), tokens, attend)
        return to_joint(rows, tokens)

    def _attend_over(
        self,
        prefix: Prefix,
        block: BlockWeights,
        index: int,
        rows: Rows,
        tokens: TokenLayout,
        of_values: torch.Tensor | None,
    ) -> Rows:
        is_bf16 = prefix.mask is not None or prefix.is_computed
        preparation = self.preparation(block, prefix.rope, tokens, of_values, is_bf16)
        onto = block.out.room_if_needed(tokens.num_rows, rows.values.dtype)
        qkv = block.qkv(rows, tokens)
        if prefix.is_computed:
            parts = operations.attention_inputs(qkv, preparation)
            prefix.keep(parts[1], parts[2])
            attended = from_joint(attend_in_blocks(parts, prefix).flatten(2), tokens)
            if of_values is not None:
                return operations.quantized(attended, of_values[:1], onto)
            return Rows(attended if onto is None else onto.copy_(attended))
        q = torch.empty(preparation.shape, dtype=preparation.dtype(qkv), device=qkv.device)
        scales, num_keys = preparation.scales, prefix.num_keys
        pair, own = beside((prefix.keys[index], prefix.values[index]), q, scales)
        operations.write_attention_inputs(qkv, preparation, (q, *own))
        return operations.attend((q, *pair), scales, tokens, of_values, onto, prefix.mask, num_keys=num_keys)


class QwenImage21Forward:
    """Replaces a transformer's forward; `later_step` computes a step after the first, and what captures it may replace
    it."""

    def __init__(self, transformer: Any, chain: CausalChain) -> None:
        self._transformer, self._chain = transformer, chain
        self.later_step: Callable[..., torch.Tensor] = self._later_step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        transformer = self._transformer
        cache = kwargs.get("kv_cache")
        prefix = None if cache is None else cache.get_layer(0).k
        # Step caches learn of the image's tokens from the module of positions, which diffusers' forward calls.
        is_watched = bool(transformer.pos_embed._forward_pre_hooks)
        if args or is_watched or kwargs.get("kv_cache_mode") != "cached" or prefix is None:
            return type(transformer).forward(transformer, *args, **kwargs)
        latents = kwargs["hidden_states"][:, -math.prod(kwargs["img_shapes"][0][-1]) :]
        kept = prefix.length, prefix.rope, prefix.mask, prefix.num_keys, prefix.keys, prefix.values
        image = self.later_step(latents, kwargs["timestep"], *kept)
        return Transformer2DModelOutput(sample=image) if kwargs.get("return_dict", True) else (image,)

    def _later_step(
        self,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        length: int,
        rope: Tables,
        mask: torch.Tensor | None,
        num_keys: torch.Tensor | None,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        """Return what a step predicts of the image's latents, (batch, tokens, channels); for the rest see `Prefix`."""
        transformer = self._transformer
        image = transformer.img_in(latents)
        times = timestep.to(image.dtype)
        embedding = transformer.time_text_embed(torch.cat([times, times.new_zeros(1)]), image)
        prefix = Prefix(length, None, rope, mask, num_keys=num_keys, keys=keys, values=values)
        image = self._chain.behind(image, transformer.modulation(embedding), prefix, is_still=True)
        made: torch.Tensor = transformer.proj_out(transformer.norm_out(image, embedding[:-1]))
        return made


def _fuse(transformer: Any, pipe: Any, how: Fusing) -> FusedTransformer:
    name_layers(transformer)
    cast_inputs(cast_last, transformer.img_in, transformer.txt_in)
    num_heads = transformer.config.num_attention_heads
    chain = CausalChain([*transformer.transformer_blocks], num_heads, how)
    take_blocks(transformer, "transformer_blocks", chain)
    transformer.forward = QwenImage21Forward(transformer, chain)
    return FusedTransformer(True, lambda: chain.num_calls)


# In bf16 frequencies would give every timestep another phase.
FORM = FusedForm(("transformer_blocks",), _fuse, exact=("time_text_embed.time_proj.freqs",))


def _vectors(modulation: torch.Tensor, batch: int, is_still: bool) -> torch.Tensor:
    """Return the vectors, without shifts, for the image and what is in front of it, (batch, 2, 6, channels), in
    fp32."""
    own = modulation[:batch].float().unflatten(1, (4, -1))
    still = modulation[batch:].float().unflatten(1, (4, -1)).expand(batch, -1, -1) if is_still else own
    scales, gates = torch.stack([own, still], dim=1).unflatten(2, (2, 2)).unbind(3)
    return torch.stack([torch.zeros_like(scales), scales, gates.tanh()], dim=3).flatten(2, 3)


def attend_in_blocks(qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], prefix: Prefix) -> torch.Tensor:
    """Return attention's output (batch, tokens, heads, channels) of a prefix and the image behind it, in bf16."""
    assert prefix.segments is not None
    q, k, v = (each.transpose(1, 2) for each in qkv)
    length = q.shape[2]
    parts = []
    for start, end, is_text in (*prefix.segments, (prefix.length, length, False)):
        mask = None if prefix.mask is None else prefix.mask[:, None, None, :end]
        is_causal = is_text and start == 0 and mask is None
        if is_text and not is_causal:
            causal = torch.ones(end - start, end, dtype=torch.bool, device=q.device).tril(start)
            mask = causal if mask is None else causal & mask
        with sdpa_kernel([*_ANY_LENGTH], set_priority=True):
            parts.append(
                torch.nn.functional.scaled_dot_product_attention(
                    q[:, :, start:end], k[:, :, :end], v[:, :, :end], attn_mask=mask, is_causal=is_causal
                )
            )
    return torch.cat(parts, dim=2).transpose(1, 2)
