"""Z-Image's blocks over fused weights: one stream, RMSNorm before and behind attention and MLP, SwiGLU.

A chain of blocks takes the place of a list of diffusers' blocks, so that a branch is added to the stream by the kernel
that also makes the next block's input. All else stays diffusers': patches, positions, embedders, the last layer.
Source: diffusers, ZImageTransformer2DModel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vivace.errors import Unsupported
from vivace.machinery.fused import operations
from vivace.machinery.fused.block_attention import attend
from vivace.machinery.fused.block_weights import Norms, projections
from vivace.machinery.fused.casts import cast_all, cast_all_named
from vivace.machinery.fused.chain import take_over
from vivace.machinery.fused.lora_beside import LorasBeside
from vivace.machinery.fused.lora_columns import LoraSlot, name_layers
from vivace.machinery.fused.operations import AttentionPreparation, Places, Rows, RowScaled
from vivace.machinery.fused.products import Product
from vivace.machinery.fused.refusals import refuse_controlnet
from vivace.machinery.fused.scales import GROWTH, spread
from vivace.machinery.kernels.reference import TokenLayout, scale_of

CHAINS = ("noise_refiner", "context_refiner", "layers")
_CONTROLNET_AT = 4
"""Positional arguments of diffusers' forward before those of a ControlNet."""
_VECTORS = 4
"""Vectors of a block: the weight of attention's norm, its gate, the weight of the MLP's norm, its gate."""


class SandwichBlock(nn.Module):
    """The products of one block, and the norms of its queries and keys."""

    def __init__(self, block: Any, quantize: bool, bounded: bool) -> None:
        super().__init__()
        attention, mlp = block.attention, block.feed_forward
        self.qkv = Product([projections(attention, "image")], quantize)
        self.out = Product([[attention.to_out[0]]], quantize)
        self.up = Product([[mlp.w1, mlp.w3]], quantize)
        self.down = Product([[mlp.w2]], quantize)
        self.norms = Norms([(attention.norm_q, attention.norm_k)], bounded)

    def largest_value_row(self) -> torch.Tensor:
        """Return the largest norm of a row of the values' e4m3 weight, ()."""
        assert self.qkv.scale is not None
        channels = self.qkv.weight.shape[2]
        return (self.qkv.weight[0, 2 * channels :].float() * self.qkv.scale).norm(dim=1).amax()


def _weights_of(block: Any, quantize: bool, bounded: bool) -> tuple[SandwichBlock, torch.Tensor | None]:
    weights = SandwichBlock(block, quantize, bounded)
    return weights, weights.largest_value_row() if quantize else None


class BlockChain(nn.Module):
    """Blocks that follow each other.

    Args:
        blocks: diffusers'; all of them are modulated, or none.
        bounded: for each block, whether attention's inputs are to be bounded, for fp8.

    Attributes:
        takes_layers: diffusers' layers are not its own modules, but slots of its products.
        loras: what is added to the modulations.
        attention_norm1, adaLN_modulation: the first block's, by whose output step caches decide.
        num_calls: of its forward.
    """

    takes_layers = True

    def __init__(
        self, blocks: Sequence[Any], num_heads: int, quantize: bool, bounded: Sequence[bool], places: Places
    ) -> None:
        super().__init__()
        self.num_calls = 0
        self._num_heads = num_heads
        self._eps, self._eps_of_heads = blocks[0].attention_norm1.eps, blocks[0].attention.norm_q.eps
        norms = [
            torch.stack([block.attention_norm1.weight, block.attention_norm2.weight,
                         block.ffn_norm1.weight, block.ffn_norm2.weight])
            for block in blocks
        ]  # fmt: skip
        self.register_buffer("norms", torch.stack(norms).detach().float().to(places.home))
        self.modulation: nn.Linear | None = None
        self.attention_norm1 = blocks[0].attention_norm1
        self.loras = LorasBeside()
        if blocks[0].modulation:
            layers = [block.adaLN_modulation[0] for block in blocks]
            for index, layer in enumerate(layers):
                outputs = slice(index * layer.out_features, (index + 1) * layer.out_features)
                self.loras.add_layer(layer, layer.in_features, outputs)
            self.adaLN_modulation = nn.Sequential(_FirstModulation(layers[0], self.loras))
            self.modulation = _one_layer(layers).to(places.home)
        take_over(
            self,
            zip(blocks, bounded, strict=True),
            ("attention", "feed_forward"),
            lambda block, is_bounded: _weights_of(block, quantize, is_bounded),
            places,
        )

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
        self.num_calls += 1
        batch, length, channels = x.shape
        rows = x.to(torch.bfloat16, copy=True).flatten(0, 1).contiguous()
        tokens = TokenLayout(batch, 0, length)
        angles = freqs_cis[0] if batch == 1 else freqs_cis
        rope = angles.real.float().contiguous(), angles.imag.float().contiguous()
        vectors = self._vectors(adaln_input, batch)
        scales = self._scales(vectors)
        flat = vectors.flatten(1)
        pending: RowScaled | None = None
        gate = 0
        for index, block in enumerate(self.blocks):
            start = index * _VECTORS * channels
            of_inputs, of_values = (None, None), None
            if scales is not None:
                of_inputs, of_values = scales[0][index], scales[1][index]
            normed = operations.add_and_rms_norm(
                rows, pending, flat, gate, start, of_inputs[0], self._eps, block.qkv.room
            )
            attended = self._attend(block, normed, rope, tokens, of_values, attn_mask)
            branch = RowScaled(block.out(attended, tokens))
            normed = operations.add_and_rms_norm(
                rows,
                branch,
                flat,
                start + channels,
                start + 2 * channels,
                of_inputs[1],
                self._eps,
                block.up.room,
            )
            active = operations.swiglu(block.up(normed, tokens), self.unit is not None, room=block.down.room)
            unit = None if self.unit is None else self.unit[:1]
            pending = RowScaled(block.down(Rows(active.values, unit), tokens), active.scales)
            gate = start + 3 * channels
        operations.add_and_rms_norm(rows, pending, flat, gate, None, None, self._eps)
        return rows.unflatten(0, (batch, length))

    @property
    def lora_slots(self) -> list[LoraSlot]:
        return list(self.loras.slots)

    def write_loras(self, rescaled_to: float | None = None) -> None:
        """Take over what the slots hold: see `Product.write_loras`."""
        self.loras.write()

    def lora_tensors(self) -> list[torch.Tensor]:
        return self.loras.tensors()

    def _vectors(self, conditioning: torch.Tensor | None, batch: int) -> torch.Tensor:
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

    def _scales(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the scales of the products' inputs (blocks, 2, 1), and of values with their inverse (blocks, 2).

        A normalised token of n channels has the norm sqrt(n): see `vivace.machinery.fused.scales`.
        """
        if self.largest is None:
            return None
        reach = vectors.shape[-1] ** 0.5 * vectors[:, :, 0::2].abs().amax(dim=(0, 3))
        values = scale_of(reach[:, 0] * self.largest * GROWTH)
        inputs = spread(scale_of(reach))[..., :1]
        return inputs, spread(torch.stack([values, 1 / values], dim=1))[..., 0]

    def _attend(
        self,
        block: SandwichBlock,
        rows: Rows,
        rope: tuple[torch.Tensor, torch.Tensor],
        tokens: TokenLayout,
        of_values: torch.Tensor | None,
        mask: torch.Tensor | None,
    ) -> Rows:
        scales = block.norms.attention_scales(of_values, is_bf16=mask is not None)
        preparation = AttentionPreparation(
            block.qkv.left_bias, block.norms.weight, rope, tokens, self._num_heads, scales, self._eps_of_heads
        )
        qkv = operations.attention_inputs(block.qkv(rows, tokens), preparation)
        onto = block.out.room_if_needed(tokens.num_rows, rows.values.dtype)
        return attend(qkv, scales, tokens, of_values, onto, mask)


class _FirstModulation(nn.Module):
    """The first block's modulation alone, with its LoRAs.

    Args:
        loras: of all blocks; stay registered with their owner only.
    """

    def __init__(self, layer: nn.Linear, loras: LorasBeside) -> None:
        super().__init__()
        self.layer = layer
        self._loras = (loras,)

    def forward(self, conditioning: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(conditioning)
        change = self._loras[0].of_layer(0, conditioning)
        return made if change is None else made + change


def fuse_z_image(
    transformer: Any, quantize: bool, bounded: tuple[bool, ...], places: Places
) -> list[BlockChain]:
    """Replace a transformer's lists of blocks by chains, each the only element of its list.

    Args:
        quantize: store weights in e4m3, with one scale for each; else in bf16.
        bounded: for each block of `CHAINS`, in their order, whether attention's inputs are to be bounded, for fp8.
        places: where the model computes, and where its weights are kept.
    """
    name_layers(transformer)
    transformer.register_forward_pre_hook(_refuse_controlnet, with_kwargs=True)
    for layer in (*transformer.all_x_embedder.values(), transformer.cap_embedder):
        layer.register_forward_pre_hook(cast_all)
    for layer in transformer.all_final_layer.values():
        layer.register_forward_pre_hook(cast_all_named, with_kwargs=True)
    made = []
    for name in CHAINS:
        blocks = list(getattr(transformer, name))
        of_chain, bounded = bounded[: len(blocks)], bounded[len(blocks) :]
        if not blocks:
            continue
        chain = BlockChain(blocks, transformer.n_heads, quantize, of_chain, places)
        setattr(transformer, name, nn.ModuleList([chain.eval().requires_grad_(False)]))
        made.append(chain)
    return made


def _one_layer(layers: Sequence[Any]) -> nn.Linear:
    """Return a layer whose outputs are those of several, side by side, in bf16."""
    with torch.device("meta"):
        whole = nn.Linear(layers[0].in_features, sum(layer.out_features for layer in layers))
    whole.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]).bfloat16(), requires_grad=False)
    whole.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]).bfloat16(), requires_grad=False)
    return whole


def _refuse_controlnet(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    refuse_controlnet(kwargs.get("controlnet_block_samples"), *args[_CONTROLNET_AT:])
