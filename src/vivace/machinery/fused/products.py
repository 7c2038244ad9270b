"""Matmuls of the fused models: one weight for all rows of tokens, or one for the text's and one for the image's.

In bf16 biases are added by the matmul. In fp8 both factors are in e4m3, each with one scale, and sums are accumulated
fast (in the tensor cores' own 22 bits); biases are left to the kernel that reads the result, where they cost nothing.
GELU, and in fp8 the rounding of its output, are part of the matmul.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import register_flop_formula

from vivace.machinery.fused.lora_columns import LoraColumns, LoraSlot
from vivace.machinery.fused.operations import Room, Rows
from vivace.machinery.fused.scales import spread
from vivace.machinery.kernels import reference
from vivace.machinery.kernels.reference import TokenLayout

# On meta tensors nothing is multiplied, but what counts operations has to see that there is a product.
_LIBRARY = torch.library.Library("vivace", "FRAGMENT")
_LIBRARY.define("fused_product(Tensor values, Tensor weight, Tensor(a!) out) -> ()")
_LIBRARY.impl("fused_product", lambda values, weight, out: None, "Meta")


@register_flop_formula(torch.ops.vivace.fused_product)
def _num_operations(values: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * values[0] * values[1] * weight[0]


class Product(nn.Module):
    """Weights (streams, outputs, inputs), one or two streams, and biases (streams, outputs) or None.

    Args:
        linears: for each stream the Linear layers whose outputs lie side by side.
        quantize: store e4m3, with a scale for each stream's weight, (streams,).
        adds_bias: add biases in e4m3 as well.
        rows_are_scaled: each row of e4m3 inputs fills e4m3's range: it has a scale of its own.
    """

    def __init__(
        self,
        linears: Sequence[Sequence[nn.Linear]],
        quantize: bool,
        adds_bias: bool = False,
        rows_are_scaled: bool = False,
    ) -> None:
        super().__init__()
        self._adds_bias = adds_bias or not quantize
        weights, scales = [], []
        for layers in linears:
            whole = torch.cat([layer.weight.detach().bfloat16() for layer in layers])
            if quantize:
                whole, scale = _quantized_weight(whole)
                scales.append(scale)
            weights.append(whole)
        self.weight = nn.Parameter(torch.stack(weights), requires_grad=False)
        self.register_buffer("spread_scale", spread(torch.cat(scales)) if quantize else None)
        self.register_buffer("bias", _biases(linears))
        self.num_inputs = self.weight.shape[2]
        self.lora = LoraColumns([_slots(layers) for layers in linears], rows_are_scaled)

    @property
    def scale(self) -> torch.Tensor | None:
        """Scale of each stream's weight, (streams,), fp32."""
        return None if self.spread_scale is None else self.spread_scale[..., 0]

    @property
    def left_bias(self) -> torch.Tensor | None:
        """The bias, if the reader of the result has to add it."""
        return None if self._adds_bias else self.bias

    @property
    def lora_slots(self) -> list[LoraSlot]:
        return list(self.lora.slots)

    def write_loras(self, rescaled_to: float | None = None) -> None:
        """Take over the LoRAs in the slots; `rescaled_to`: if only a factor has changed, the larger of both."""
        if rescaled_to is not None and rescaled_to <= LoraSlot.free_amount:
            self.lora.write_columns(self.weight.data)
            return
        if self.lora.width != self.lora.needed_width():
            self.weight = nn.Parameter(self.lora.widen(self.weight.data), requires_grad=False)
        self.lora.write(self.weight.data, self.scale)

    def lora_tensors(self) -> list[torch.Tensor]:
        return self.lora.tensors(self.weight.data)

    def room(self, shape: Sequence[int], *, dtype: torch.dtype) -> torch.Tensor:
        """Return inputs (rows, inputs), undefined: part of rows that have room for A x."""
        return room_for(self)(shape, dtype=dtype)

    def room_if_needed(self, num_rows: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return `room`, if there are LoRAs; None lets the caller's rows stay where they are."""
        return self.room((num_rows, self.num_inputs), dtype=dtype) if self.lora.width else None

    def with_room(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows (rows, inputs) that lie elsewhere, with room for A x if there are LoRAs."""
        room = self.room_if_needed(len(rows), rows.dtype)
        return rows if room is None else room.copy_(rows)

    def forward(self, rows: Rows, tokens: TokenLayout, onto: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product (rows, outputs) in bf16, added to `onto` before rounding."""
        made = self.empty(rows)
        self.write(rows, tokens, made, onto=onto)
        return made

    def write(
        self,
        rows: Rows,
        tokens: TokenLayout,
        made: torch.Tensor,
        outputs: slice = slice(None),
        onto: torch.Tensor | None = None,
    ) -> None:
        """Write some outputs of the product to their place among all, in `made`, (rows, outputs)."""
        for stream, span in self._spans(tokens):
            weight, out = self.weight[stream, outputs], made[span, outputs]
            values = self._with_lora(rows.values[span], stream)
            if made.is_meta:
                torch.ops.vivace.fused_product(values, weight, out)
                continue
            bias = self.bias[stream, outputs] if self._adds_bias and self.bias is not None else None
            added = None if onto is None else onto[span, outputs]
            multiply(values, weight, self._scales(rows, stream), bias, out, added, self.lora.width)

    def empty(self, rows: Rows, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return a tensor for a result, (rows, outputs), undefined."""
        shape = (rows.values.shape[0], self.weight.shape[1])
        return torch.empty(shape, dtype=dtype, device=self.weight.device)

    def activated(
        self, rows: Rows, tokens: TokenLayout, scales: torch.Tensor | None, onto: torch.Tensor | None = None
    ) -> Rows:
        """Return GELU of the product and its bias, written `onto`; in e4m3 with outputs' scales and their inverses."""
        dtype = torch.bfloat16 if scales is None else torch.float8_e4m3fn
        made = self.empty(rows, dtype) if onto is None else onto
        for stream, span in self._spans(tokens):
            values = self._with_lora(rows.values[span], stream)
            if made.is_meta:
                torch.ops.vivace.fused_product(values, self.weight[stream], made[span])
                continue
            scales_of_inputs, bias = self._scales(rows, stream), self.bias[stream]
            of_out = None if scales is None else (_of(scales[0], stream), _of(scales[1], stream))
            multiply_with_gelu(
                values, self.weight[stream], scales_of_inputs, bias, made[span], of_out, self.lora.width
            )
        return Rows(made, None if scales is None else scales[0])

    def _with_lora(self, values: torch.Tensor, stream: int) -> torch.Tensor:
        """Write A x behind the inputs (rows, inputs); return both."""
        if not self.lora.width:
            return values
        wide = values.as_strided((len(values), self.num_inputs + self.lora.width), values.stride())
        inner, down = wide[:, self.num_inputs :], self.lora.down[stream]
        if values.is_meta:
            torch.ops.vivace.fused_product(values, down, inner)
        elif self.lora.sigma is None:
            multiply(values, down, (), None, inner)
        else:
            no_scale = self.lora.no_scale
            multiply(values, down, (no_scale, self.lora.sigma[stream], no_scale), None, inner)
        return wide

    def _scales(self, rows: Rows, stream: int) -> tuple[torch.Tensor, ...]:
        return () if self.scale is None else (_of(rows.scale, stream), self.scale[stream])

    def _spans(self, tokens: TokenLayout) -> list[tuple[int, slice]]:
        """Return the rows of each stream that has any."""
        split = tokens.num_text_rows
        if len(self.weight) == 1:
            return [(0, slice(None))]
        return [(0, slice(0, split)), (1, slice(split, None))] if split else [(1, slice(None))]


def room_for(*products: Product) -> Room:
    """Return what makes inputs (rows, inputs) that several products take in turn, each with its LoRAs."""
    width = max(product.num_inputs + product.lora.width for product in products)

    def make(shape: Sequence[int], *, dtype: torch.dtype) -> torch.Tensor:
        wide = torch.empty((shape[0], width), dtype=dtype, device=products[0].weight.device)
        return wide[:, : shape[1]]

    return make


def multiply(
    values: torch.Tensor,
    weight: torch.Tensor,
    scales: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    onto: torch.Tensor | None = None,
    num_lora: int = 0,
) -> None:
    """Write a product, with a bias if there is one, to `out`, as `cublas_lt.multiply` does; on a CPU in fp32."""
    if values.is_cuda:
        from vivace.machinery.fused import cublas_lt

        cublas_lt.multiply(values, weight, scales, bias, out, onto=onto)
        return
    made = _product(values, weight, scales, bias, num_lora)
    if out.dtype == torch.float8_e4m3fn:
        made = reference.to_e4m3(made)
    out.copy_(made if onto is None else made + onto.float())


def multiply_with_gelu(
    values: torch.Tensor,
    weight: torch.Tensor,
    scales: tuple[torch.Tensor, ...],
    bias: torch.Tensor,
    out: torch.Tensor,
    of_out: tuple[torch.Tensor, torch.Tensor] | None = None,
    num_lora: int = 0,
) -> None:
    """Write GELU of a product and its bias to `out`, in e4m3 by its scale `of_out` (and inverse): see `multiply`."""
    if values.is_cuda:
        from vivace.machinery.fused import cublas_lt

        all_scales = scales if of_out is None else (*scales, of_out[1])
        cublas_lt.multiply(values, weight, all_scales, bias, out, gelu=True)
        return
    active = reference.gelu(_product(values, weight, scales, bias, num_lora))
    out.copy_(active if of_out is None else reference.to_e4m3(active / of_out[0]))


def _product(
    values: torch.Tensor,
    weight: torch.Tensor,
    scales: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    num_lora: int,
) -> torch.Tensor:
    values, weight = values.float(), weight.float()
    split = values.shape[1] - num_lora
    # Apart, so that the order of the other sums does not depend on how many ranks are reserved.
    made = values[:, :split].contiguous() @ weight[:, :split].contiguous().t()
    if num_lora:
        made += values[:, split:] @ weight[:, split:].t()
    for scale in scales:
        made = made * scale.reshape(-1)[0]
    return made if bias is None else made + bias.float()


def _of(scales: Any, stream: int) -> Any:
    return scales[stream] if len(scales) > 1 else scales[0]


def _quantized_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if weight.is_meta:
        return torch.empty_like(weight, dtype=torch.float8_e4m3fn), weight.new_empty(1, dtype=torch.float32)
    return reference.quantize_whole(weight)


def _slots(layers: Sequence[nn.Linear]) -> list[LoraSlot]:
    slots, start = [], 0
    for layer in layers:
        outputs, num_inputs = layer.weight.shape
        name = getattr(layer, "vivace_name", "")
        order = getattr(layer, "vivace_order", None)
        slots.append(LoraSlot(name, num_inputs, slice(start, start + outputs), order))
        start += outputs
    return slots


def _biases(linears: Sequence[Sequence[nn.Linear]]) -> torch.Tensor | None:
    if all(layer.bias is None for layers in linears for layer in layers):
        return None

    def of(layer: nn.Linear) -> torch.Tensor:
        return layer.bias.detach() if layer.bias is not None else layer.weight.new_zeros(len(layer.weight))

    return torch.stack([torch.cat([of(layer) for layer in layers]) for layers in linears]).bfloat16()
