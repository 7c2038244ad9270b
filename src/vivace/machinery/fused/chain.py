"""Blocks of one stream over fused weights, as a chain that takes the place of diffusers' list of blocks.

A branch is added to the stream by the kernel that also makes the next branch's input. All else of a transformer stays
diffusers': embedders, positions, the last layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from vivace.machinery.attention_backends.cudnn_fp8 import takes_padding
from vivace.machinery.fused import image_operations as images
from vivace.machinery.fused import operations
from vivace.machinery.fused.block_weights import BlockLayers, BlockWeights
from vivace.machinery.fused.forms import Fusing
from vivace.machinery.fused.operations import AttentionPreparation, Room, Rows
from vivace.machinery.fused.scales import GROWTH, spread
from vivace.machinery.kernels.reference import Branch, Modulation, TokenLayout, scale_of

Attend = Callable[[BlockWeights, int, Rows, torch.Tensor | None], Rows]
"""Returns attention's output by a block's weights and its index, the rows it reads and the scales of its values."""
Tables = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, (tokens, pairs) or (batch, tokens, pairs), in fp32."""


@dataclass(frozen=True)
class ChainForm:
    """What blocks of one stream are.

    Attributes:
        layers: of a block of diffusers'.
        parts: the attributes of a block whose layers the fused weights replace.
        norm: of a branch's input: LayerNorm or RMSNorm; "sandwich": RMSNorm, of a branch's output too.
        order: of the vectors of attention, and then of the MLP: "shift", "scale" and "gate". In a sandwich a scale is
            the norm's whole weight, and there is no shift; else one is added to it.
        shares_vectors: all blocks have the same vectors: those of the image's tokens, then those of the text's.
        activation: of the MLP, whose first product has what it is of (SwiGLU) or what it multiplies (GEGLU) in front.
        gates_attention: attention's output is multiplied by a sigmoid of the projection behind its values.
    """

    layers: Callable[[Any], BlockLayers]
    parts: tuple[str, ...]
    norm: Literal["layer", "rms", "sandwich"]
    order: tuple[str, ...]
    shares_vectors: bool = False
    activation: Literal["swiglu", "geglu"] = "swiglu"
    gates_attention: bool = False


class BlockChain(nn.Module):
    """Blocks that follow each other. Those of each model are a class of its own, whose forward calls `over_stream`.

    Args:
        num_heads: of queries, and of keys and values.
        bounded: for each block, whether attention's inputs are to be bounded, for fp8.

    Attributes:
        takes_layers: diffusers' layers are not its own modules, but slots of its products.
        pads: whether texts may have padding behind all other tokens: attention is told how many tokens there are.
        largest: for fp8, of each block the largest norm of a row of the values' weight, (blocks,).
        unit: a scale of one, (4,), of which cuBLASLt takes the first; for fp8.
    """

    takes_layers = True

    def __init__(
        self,
        blocks: Sequence[Any],
        form: ChainForm,
        num_heads: tuple[int, int],
        eps: tuple[float, float],
        how: Fusing,
    ) -> None:
        super().__init__()
        quantize, places = how.quantize, how.places
        self.num_calls = 0
        self.pads = all(how.bounded) and takes_padding()
        self._form, self._num_heads = form, num_heads
        self._eps, self._eps_of_heads = eps
        self.blocks = nn.ModuleList()
        largest = []
        for block, is_bounded in zip(blocks, how.bounded, strict=True):
            block.to(places.work)
            weights = BlockWeights(form.layers(block), "swiglu", quantize, is_bounded)
            assert weights.out.bias is None, "no bias is added here"
            if quantize:
                assert weights.qkv.scale is not None
                of_values = weights.qkv.weight[0, self._values_of(weights)].float() * weights.qkv.scale
                largest.append(of_values.norm(dim=1).amax())
            self.blocks.append(weights.to(places.home))
            for part in form.parts:
                delattr(block, part)
        self.register_buffer("largest", torch.stack(largest).to(places.home) if largest else None)
        unit = spread(torch.ones(1, device=places.home))[0] if largest else None
        self.register_buffer("unit", unit, persistent=False)

    def over_stream(
        self,
        x: torch.Tensor,
        vectors: torch.Tensor,
        rope: Tables,
        mask: torch.Tensor | None,
        num_keys: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the tokens behind the last block, (batch, tokens, channels); a mask makes attention bf16."""
        batch, length, _ = x.shape
        rows = x.to(torch.bfloat16, copy=True).flatten(0, 1).contiguous()
        tokens = TokenLayout(batch, 0, length)

        def attend(block: BlockWeights, _: int, normed: Rows, of_values: torch.Tensor | None) -> Rows:
            return self._attend(block, normed, rope, tokens, of_values, mask, num_keys)

        self.compute(rows, vectors, tokens, attend)
        return rows.unflatten(0, (batch, length))

    def compute(self, rows: torch.Tensor, vectors: torch.Tensor, tokens: TokenLayout, attend: Attend) -> None:
        """Write the tokens behind the last block over those in front of the first, (rows, channels), in bf16.

        Args:
            vectors: (batch, blocks, vectors of a block, channels), in fp32: see `ChainForm.order`. Where all blocks
                have the same: (batch, 2, vectors of a block, channels).
        """
        self.num_calls += 1
        inputs, values = self._scales(vectors)
        flat, channels = vectors.flatten(1), vectors.shape[-1]
        unit = None if self.unit is None else self.unit[:1]
        pending: Branch | None = None
        for index, block in enumerate(self.blocks):
            first, second = (self._offsets(index, branch, channels) for branch in range(2))
            normed = self._norm(rows, pending, flat, first, tokens, inputs[index][0], block.qkv.room)
            branch = Branch(block.out(attend(block, index, normed, values[index]), tokens), first["gate"])
            normed = self._norm(rows, branch, flat, second, tokens, inputs[index][1], block.up.room)
            hidden, is_scaled = block.up(normed, tokens), unit is not None
            if self._form.activation == "swiglu":
                active = operations.swiglu(hidden, is_scaled, room=block.down.room)
            else:
                active = images.geglu(hidden, None, is_scaled, block.down.room)
            made = block.down(Rows(active.values, unit), tokens)
            pending = Branch(made, second["gate"], row_scales=active.scales)
        self._norm(rows, pending, flat, None, tokens, None, None)

    def preparation(
        self, block: BlockWeights, rope: Tables, tokens: TokenLayout, of_values: Any, is_bf16: bool
    ) -> AttentionPreparation:
        """Return the steps from a block's projection to attention's inputs; `of_values`: their scale and its
        inverse."""
        return AttentionPreparation(
            block.qkv.left_bias,
            block.norms.weight,
            rope,
            tokens,
            self._num_heads[0],
            block.norms.attention_scales(of_values, is_bf16),
            self._eps_of_heads,
            self._num_heads[1],
        )

    def _attend(
        self,
        block: BlockWeights,
        rows: Rows,
        rope: Tables,
        tokens: TokenLayout,
        of_values: torch.Tensor | None,
        mask: torch.Tensor | None,
        num_keys: torch.Tensor | None,
    ) -> Rows:
        preparation = self.preparation(block, rope, tokens, of_values, mask is not None)
        projected = block.qkv(rows, tokens)
        qkv = operations.attention_inputs(projected, preparation)
        if not self._form.gates_attention:
            onto = block.out.room_if_needed(tokens.num_rows, rows.values.dtype)
            return operations.attend(
                qkv, preparation.scales, tokens, of_values, onto, mask, num_keys=num_keys
            )
        attended = operations.attend(qkv, preparation.scales, tokens, None, mask=mask, num_keys=num_keys)
        scale = None if of_values is None else of_values[:1]
        gate = projected[:, self._values_of(block).stop :]
        return operations.sigmoid_gated(attended, gate, scale, block.out.room)

    def _values_of(self, block: BlockWeights) -> slice:
        (num_heads, num_key_heads), channels = self._num_heads, block.norms.weight.shape[-1]
        start = (num_heads + num_key_heads) * channels
        return slice(start, start + num_key_heads * channels)

    def _offsets(self, index: int, branch: int, channels: int) -> dict[str, Modulation]:
        form, num = self._form, len(self._form.order)
        first = branch * num if form.shares_vectors else (2 * index + branch) * num
        of_text = 2 * num * channels if form.shares_vectors else 0
        starts = {name: (first + place) * channels for place, name in enumerate(form.order)}
        return {name: Modulation(start + of_text, start) for name, start in starts.items()}

    def _norm(
        self,
        rows: torch.Tensor,
        branch: Branch | None,
        vectors: torch.Tensor,
        offsets: dict[str, Modulation] | None,
        tokens: TokenLayout,
        scale: torch.Tensor | None,
        room: Room | None,
    ) -> Rows:
        kind = self._form.norm
        if kind == "sandwich":
            weight = None if offsets is None else offsets["scale"].image
            return operations.add_and_rms_norm(rows, branch, vectors, weight, scale, self._eps, room)
        norm = None if offsets is None else (offsets["shift"], offsets["scale"])
        return operations.add_and_norm(
            rows, branch, vectors, norm, tokens, scale, self._eps, room, centred=kind == "layer"
        )

    def _scales(self, vectors: torch.Tensor) -> tuple[Any, Any]:
        """Return the scales of the products' inputs (blocks, 2, 1), and of values with their inverse (blocks, 2)."""
        num_blocks = len(self.blocks)
        if self.largest is None:
            return [(None, None)] * num_blocks, [None] * num_blocks
        form = self._form

        def part(name: str) -> torch.Tensor:
            return vectors[:, :, form.order.index(name) :: len(form.order)]

        factors = part("scale") if form.norm == "sandwich" else 1 + part("scale")
        largest = vectors.shape[-1] ** 0.5 * factors.abs().amax(dim=-1)  # (batch, blocks, 2)
        length = largest[:, :, 0]
        if "shift" in form.order:
            shifts = part("shift")
            length = length + shifts[:, :, 0].norm(dim=-1)
            largest = largest + shifts.abs().amax(dim=-1)
        over = (0, 1) if form.shares_vectors else (0,)
        inputs = spread(scale_of(largest.amax(dim=over)))[..., :1].expand(num_blocks, 2, 1)
        values = scale_of(length.amax(dim=over) * self.largest * GROWTH)
        return inputs, spread(torch.stack([values, 1 / values], dim=1))[..., 0]


def take_blocks(transformer: Any, name: str, chain: BlockChain) -> None:
    setattr(transformer, name, nn.ModuleList([chain.eval().requires_grad_(False)]))
