"""Z-Image's blocks over fused weights: one stream, RMSNorm before and behind attention and MLP, SwiGLU.

Source: diffusers, ZImageTransformer2DModel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vivace.errors import Unsupported
from vivace.machinery.fused.block_weights import BlockLayers, projections
from vivace.machinery.fused.calls import cast_all, cast_all_named, cast_inputs, refuse_controlnet
from vivace.machinery.fused.chain import BlockChain, ChainForm, take_blocks
from vivace.machinery.fused.forms import FusedForm, FusedTransformer, Fusing
from vivace.machinery.fused.lora_columns import LoraOwner, LorasBeside, name_layers

_CONTROLNET_AT = 4
"""Positional arguments of diffusers' forward before those of a ControlNet."""


def _layers(block: Any) -> BlockLayers:
    attention, mlp = block.attention, block.feed_forward
    return BlockLayers(
        qkv=[projections(attention, "image")],
        out=[[attention.to_out[0]]],
        up=[[mlp.w1, mlp.w3]],
        down=[[mlp.w2]],
        norms=[(attention.norm_q, attention.norm_k)],
    )


SANDWICH = ChainForm(_layers, ("attention", "feed_forward"), "sandwich", ("scale", "gate"))


class SandwichChain(LoraOwner, BlockChain):
    """Blocks whose norms, (blocks, 4, channels), in front of attention and behind it, and of the MLP, are multiplied by
    what modulates them, or by nothing. Step caches decide by attention_norm1 and first_modulation."""

    def __init__(
        self,
        blocks: Sequence[Any],
        form: ChainForm,
        num_heads: int,
        modulations: Sequence[nn.Linear],
        how: Fusing,
    ) -> None:
        first = blocks[0]
        eps = first.attention_norm1.eps, first.attention.norm_q.eps
        super().__init__(blocks, form, (num_heads, num_heads), eps, how)
        norms = [
            torch.stack([block.attention_norm1.weight, block.attention_norm2.weight,
                         block.ffn_norm1.weight, block.ffn_norm2.weight])
            for block in blocks
        ]  # fmt: skip
        self.register_buffer("norms", torch.stack(norms).detach().float().to(how.places.home))
        self.modulation: nn.Linear | None = None
        self.attention_norm1 = first.attention_norm1
        self.loras = LorasBeside()
        for index, layer in enumerate(modulations):
            outputs = slice(index * layer.out_features, (index + 1) * layer.out_features)
            self.loras.add_layer(layer, layer.in_features, outputs)
        if modulations:
            self.first_modulation = _FirstModulation(modulations[0], self.loras)
            self.modulation = _one_layer(modulations).to(how.places.home)

    def vectors(self, conditioning: torch.Tensor | None, batch: int) -> torch.Tensor:
        """Return the factors of each block's norms, (batch, blocks, 4, channels), in fp32."""
        if self.modulation is None:
            return self.norms.expand(batch, -1, -1, -1)
        assert conditioning is not None
        conditioning = conditioning.bfloat16()
        made = self.modulation(conditioning)
        self.loras.add(conditioning, made)
        modulations = made.float().view(batch, *self.norms.shape)
        factors = torch.stack(
            [modulations[:, :, 0::2] + 1.0, modulations[:, :, 1::2].tanh()], dim=3
        )  # (batch, blocks, attention or MLP, scale or gate, channels)
        return factors.flatten(2, 3) * self.norms


class ZImageChain(SandwichChain):
    @property
    def adaLN_modulation(self) -> nn.Module:  # noqa: N802, diffusers' name
        return self.first_modulation

    def forward(
        self,
        x: torch.Tensor,
        attn_mask: torch.Tensor | None,
        freqs_cis: torch.Tensor,
        adaln_input: torch.Tensor | None = None,
        noise_mask: torch.Tensor | None = None,
        adaln_noisy: torch.Tensor | None = None,
        adaln_clean: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the tokens behind the last block, (batch, tokens, channels). Arguments are those of a block."""
        if noise_mask is not None:
            raise Unsupported(
                "fused: the fused blocks modulate all tokens of an image alike, and this call has clean ones among "
                "them (image_noise_mask); leave fused out"
            )
        angles = freqs_cis[0] if len(x) == 1 else freqs_cis
        rope = angles.real.float().contiguous(), angles.imag.float().contiguous()
        return self.over_stream(x, self.vectors(adaln_input, len(x)), rope, attn_mask)


class _FirstModulation(nn.Module):
    """The first block's modulation alone, with its LoRAs."""

    def __init__(self, layer: nn.Linear, loras: LorasBeside) -> None:
        super().__init__()
        self.layer = layer
        self._loras = (loras,)

    def forward(self, conditioning: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(conditioning)
        change = self._loras[0].of_layer(0, conditioning)
        return made if change is None else made + change


def _fuse(transformer: Any, pipe: Any, how: Fusing) -> FusedTransformer:
    name_layers(transformer)
    transformer.register_forward_pre_hook(_refuse_controlnet, with_kwargs=True)
    cast_inputs(cast_all, *transformer.all_x_embedder.values(), transformer.cap_embedder)
    for layer in transformer.all_final_layer.values():
        layer.register_forward_pre_hook(cast_all_named, with_kwargs=True)
    made, bounded = [], how.bounded
    for name in FORM.chains:
        blocks = list(getattr(transformer, name))
        of_chain, bounded = replace(how, bounded=bounded[: len(blocks)]), bounded[len(blocks) :]
        if not blocks:
            continue
        modulations = [block.adaLN_modulation[0] for block in blocks if block.modulation]
        chain = ZImageChain(blocks, SANDWICH, transformer.n_heads, modulations, of_chain)
        take_blocks(transformer, name, chain)
        made.append(chain)
    return FusedTransformer(True, lambda: min(chain.num_calls for chain in made))


FORM = FusedForm(("noise_refiner", "context_refiner", "layers"), _fuse)


def _one_layer(layers: Sequence[Any]) -> nn.Linear:
    with torch.device("meta"):
        whole = nn.Linear(layers[0].in_features, sum(layer.out_features for layer in layers))
    whole.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]).bfloat16(), requires_grad=False)
    whole.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]).bfloat16(), requires_grad=False)
    return whole


def _refuse_controlnet(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    refuse_controlnet(kwargs.get("controlnet_block_samples"), *args[_CONTROLNET_AT:])
