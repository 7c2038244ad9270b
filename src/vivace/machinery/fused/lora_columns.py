"""LoRAs inside of matmuls: y = [W B] [x; A x], in one product whose inputs are as many wider as the ranks.

A product's inputs lie in rows that are wider than they are. A small matmul writes A x behind x, and the weight has the
columns of B. So a LoRA costs a share of rank / inputs more operations, and no pass over the output. Exchanging one
writes these columns, and A, in place: nothing is compiled or captured anew.

In e4m3 both share the product's two scales, and each rank has factors of its own that cancel out: row j of A is
multiplied by a_j = 448 / max|A_j|, so that it uses all of e4m3's range; A x is multiplied by sigma, which brings a sum
of typical elements near 8; and column j of B is divided by a_j sigma and by the weight's scale. Where that would exceed
448, sigma is as much larger. Columns are kept as they are at a LoRA's factor of 1, and a change of the factor within
that writes columns alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vivace.machinery.fused.scales import spread
from vivace.machinery.kernels.reference import E4M3_MAX, TINY, to_e4m3

_MULTIPLE = 16
"""Multiple of inputs that cuBLASLt takes in e4m3."""
_TYPICAL = 75.0
"""sigma times the root of the number of inputs, inverted: elements of x and A in e4m3 are about 4 and 150."""
_TYPICAL_OF_SCALED_ROWS = 1200.0
"""The same where each row of x has a scale of its own, so that elements are 10 to 110."""


class Slot(nn.Module):
    """A layer of diffusers' (its name, the shape of its inputs, its outputs) beside which there can be LoRAs.

    Attributes:
        down, up: (rank, inputs, ...) and (outputs, rank), in bf16, of all its LoRAs; None before any is reserved.
        amount: (rank,), fp32, what each LoRA's part is multiplied by.
    """

    down: torch.Tensor | None
    up: torch.Tensor | None
    amount: torch.Tensor | None

    def __init__(self, name: str, inputs: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.name, self._inputs, self._num_outputs = name, inputs, num_outputs
        for buffer in ("down", "up", "amount"):
            self.register_buffer(buffer, None, persistent=False)

    @property
    def rank(self) -> int:
        return 0 if self.down is None else len(self.down)

    def reserve_rank(self, rank: int, device: torch.device) -> int:
        """Reserve rows for one more LoRA; return the first of them."""
        first = self.rank
        like = {"device": device, "dtype": torch.bfloat16}
        down, up = torch.zeros(rank, *self._inputs, **like), torch.zeros(self._num_outputs, rank, **like)
        amount = torch.ones(rank, device=device)
        self.down = down if self.down is None else torch.cat([self.down, down])
        self.up = up if self.up is None else torch.cat([self.up, up], dim=1)
        self.amount = amount if self.amount is None else torch.cat([self.amount, amount])
        return first


class LoraSlot(Slot):
    """A Linear layer within a product, whose `outputs` are its own, in another `order`; no column changes but its own
    up to the factor `free_amount`."""

    free_amount = 1.0

    def __init__(
        self, name: str, in_features: int, outputs: slice, order: torch.Tensor | None = None
    ) -> None:
        self.in_features, self.out_features = in_features, outputs.stop - outputs.start
        super().__init__(name, (in_features,), self.out_features)
        self.register_buffer("order", order, persistent=False)
        self.outputs = outputs

    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B in fp32, of a slot that has some, for the product's outputs."""
        assert self.down is not None
        assert self.up is not None
        up = self.up if self.order is None else self.up.index_select(0, self.order)
        return self.down.float(), up.float()


def name_layers(transformer: nn.Module) -> None:
    for name, layer in transformer.named_modules():
        layer.vivace_name = name


class LoraColumns(nn.Module):
    """What a product computes A x with.

    Attributes:
        slots: of all streams; of rows that are scaled, in e4m3 each has a scale of its own.
        width: columns of A x, a multiple of 16; 0 before any is reserved.
        down: A, (streams, width, inputs), like the weight.
        unit: the weight's columns at a factor of 1, (streams, outputs, width), in bf16.
        sigma, no_scale: (streams, 4) and (4,), scales of which the first element counts; in e4m3.
    """

    def __init__(self, streams: list[list[LoraSlot]], rows_are_scaled: bool = False) -> None:
        super().__init__()
        self._typical = _TYPICAL_OF_SCALED_ROWS if rows_are_scaled else _TYPICAL
        self.streams = [range(0)] * len(streams)
        self.slots = nn.ModuleList()
        for stream, slots in enumerate(streams):
            self.streams[stream] = range(len(self.slots), len(self.slots) + len(slots))
            self.slots.extend(slots)
        self.width = 0
        self._ranks: list[int] = []
        self._in_use: list[tuple[int, list[Any]]] = []
        """Each stream that has slots with ranks, and these."""

    def needed_width(self) -> int:
        most: int = max(sum(self.slots[index].rank for index in stream) for stream in self.streams)
        return -(-most // _MULTIPLE) * _MULTIPLE

    def widen(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight (streams, outputs, inputs and columns) for the ranks that are reserved, its columns zero."""
        num_inputs = weight.shape[2] - self.width
        self.width = self.needed_width()
        widened = weight.new_zeros((*weight.shape[:2], num_inputs + self.width))
        widened[..., :num_inputs] = weight[..., :num_inputs]
        down = weight.new_zeros((len(weight), self.width, num_inputs))
        self.register_buffer("down", down, persistent=False)
        unit = weight.new_zeros((*weight.shape[:2], self.width), dtype=torch.bfloat16)
        self.register_buffer("unit", unit, persistent=False)
        sigma = None
        if weight.dtype == torch.float8_e4m3fn:
            sigma = spread(
                torch.full((len(weight),), 1 / (self._typical * num_inputs**0.5), device=weight.device)
            )
        self.register_buffer("sigma", sigma, persistent=False)
        no_scale = None if sigma is None else spread(torch.ones(1, device=weight.device))[0]
        self.register_buffer("no_scale", no_scale, persistent=False)
        return widened

    def write(self, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Write what the slots hold to A and to the columns of the weight that `widen` has returned, in place."""
        ranks = [slot.rank for slot in self.slots]
        if ranks != self._ranks:  # columns are other layers' now
            self._ranks, self._in_use = ranks, list(self._reserved())
            self.down.zero_()
            self.unit.zero_()
        for stream, slots in self._in_use:
            matrices = [slot.matrices() for slot in slots]
            factors: Any = [(1.0, 1.0)] * len(slots)
            if scale is not None:
                factors = self._factors(slots, matrices, stream, scale[stream])
            column = 0
            for slot, (down, up), (of_down, of_up) in zip(slots, matrices, factors, strict=True):
                own = slice(column, column + slot.rank)
                down = down * of_down
                self.down[stream, own].copy_(down if scale is None else to_e4m3(down))
                self.unit[stream, slot.outputs, own].copy_(up * of_up)
                column = own.stop
        self.write_columns(weight)

    def write_columns(self, weight: torch.Tensor) -> None:
        unit, of_weight = self.unit, self.columns(weight)
        for stream, slots in self._in_use:
            amount = torch.cat([slot.amount for slot in slots]) if len(slots) > 1 else slots[0].amount
            rank = len(amount)
            own = unit[stream, :, :rank] * amount  # in fp32
            if weight.dtype == torch.float8_e4m3fn:
                own.clamp_(-E4M3_MAX, E4M3_MAX)
            of_weight[stream, :, :rank].copy_(own)

    def columns(self, weight: torch.Tensor) -> torch.Tensor:
        """Return B within a weight, (streams, outputs, width): a view."""
        return weight[..., weight.shape[2] - self.width :]

    def tensors(self, weight: torch.Tensor) -> list[torch.Tensor]:
        if not self.width:
            return []
        return [self.columns(weight), self.down, *(() if self.sigma is None else (self.sigma,))]

    def _reserved(self) -> Iterator[tuple[int, list[Any]]]:
        for stream, indices in enumerate(self.streams):
            slots = [self.slots[index] for index in indices if self.slots[index].rank]
            if slots:
                yield stream, slots

    def _factors(
        self,
        slots: list[Any],
        matrices: list[tuple[torch.Tensor, torch.Tensor]],
        stream: int,
        scale: torch.Tensor,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the factors of A's rows (rank, 1) and of B's columns (1, rank), and set the stream's sigma."""
        rows = [down.abs().amax(dim=1).clamp(min=TINY) / E4M3_MAX for down, _ in matrices]
        columns = [
            up.abs().amax(dim=0) * slot.amount.abs().clamp(min=slot.free_amount)
            for slot, (_, up) in zip(slots, matrices, strict=True)
        ]
        reached = torch.cat([row * column for row, column in zip(rows, columns, strict=True)]).amax()
        least = 1 / (self._typical * self.slots[0].in_features ** 0.5)
        sigma = (reached / (E4M3_MAX * scale)).clamp(min=least)
        self.sigma[stream, 0] = sigma
        return [(1 / row[:, None], row[None] / (sigma * scale)) for row in rows]


# LoRAs beside layers that read the same few rows (a text, embeddings of time), and beside convolutions: such products
# take little of a step, or are computed once for many steps, so B A x is added to their output, and weights stay as
# they are. All A are one matmul, and B of layers of one size that follow each other are one batched matmul.


@dataclass(frozen=True)
class _Run:
    """Layers of one size whose outputs follow each other (`slots` from, to), and that reserve the same rank."""

    slots: slice
    ranks: slice
    outputs: slice

    @property
    def number(self) -> int:
        return int(self.slots.stop - self.slots.start)


class LorasBeside(nn.Module):
    """LoRAs of layers that read the same rows and whose outputs lie side by side.

    Attributes:
        num_changes: how often what they add has changed: results of before are out of date.
        down: A of all layers with a rank, (ranks, inputs), in bf16.
        ups: of each run B, (layers, outputs of a layer, rank), with the LoRAs' factors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.ModuleList()
        self.num_changes = 0
        self.register_buffer("down", None, persistent=False)
        self.ups = nn.Module()
        self._runs: list[_Run] = []
        self._pieces: dict[int, list[tuple[slice, int]]] = {}
        """By layer: see `add_layer`."""

    @property
    def num_ranks(self) -> int:
        return 0 if self.down is None else len(self.down)

    def add_layer(
        self, layer: Any, in_features: int, outputs: slice, pieces: list[tuple[slice, int]] | None = None
    ) -> None:
        """Add a slot for a layer, with its outputs among all; or `pieces` of them, and where each starts."""
        if pieces is not None:
            self._pieces[len(self.slots)] = pieces
        self.slots.append(LoraSlot(getattr(layer, "vivace_name", ""), in_features, outputs))

    def write(self) -> None:
        """Take over what the slots hold, in place, or into new buffers where ranks were reserved."""
        self.num_changes += 1
        if self.num_ranks != sum(slot.rank for slot in self.slots):
            self._reserve()
        for number, run in enumerate(self._runs):
            slots = list(self.slots[run.slots])
            self.down[run.ranks].copy_(torch.cat([slot.down for slot in slots]))
            ups = torch.stack([slot.matrices()[1] * slot.amount for slot in slots])
            self._up(number).copy_(ups)

    def tensors(self) -> list[torch.Tensor]:
        return [] if self.down is None else [self.down, *self.ups.buffers()]

    def add(self, rows: torch.Tensor, made: torch.Tensor) -> None:
        """Add what the LoRAs make of `rows` (rows, inputs) to the layers' outputs, (rows, outputs)."""
        if not self._runs or rows.is_meta:
            return
        inner = nn.functional.linear(_as_computed(rows), _as_computed(self.down))
        for number, run in enumerate(self._runs):
            inputs = inner[:, run.ranks].unflatten(1, (run.number, -1)).transpose(0, 1)
            change = torch.bmm(inputs, _as_computed(self._up(number)).transpose(1, 2)).transpose(0, 1)
            pieces = self._pieces.get(run.slots.start)
            if pieces is None:
                made[:, run.outputs].unflatten(1, (run.number, -1)).add_(change)
                continue
            for own, start in pieces:
                made[:, start : start + own.stop - own.start].add_(change[:, 0, own])

    def of_layer(self, index: int, rows: torch.Tensor) -> torch.Tensor | None:
        """Return what the LoRAs make of `rows` for one layer, (rows, outputs of it); None without any."""
        slot = self.slots[index]
        if not slot.rank:
            return None
        down, up = slot.matrices()
        return nn.functional.linear(nn.functional.linear(rows.float(), down), up * slot.amount).to(rows.dtype)

    def _reserve(self) -> None:
        runs, ranks = list[_Run](), 0
        for index, slot in enumerate(self.slots):
            if not slot.rank:
                continue
            own = _Run(slice(index, index + 1), slice(ranks, ranks + slot.rank), slot.outputs)
            ranks += slot.rank
            if runs and self._follows(runs[-1], index):
                first = runs.pop()
                own = _Run(
                    slice(first.slots.start, index + 1),
                    slice(first.ranks.start, ranks),
                    slice(first.outputs.start, slot.outputs.stop),
                )
            runs.append(own)
        self._runs = runs
        reserved = next(slot for slot in self.slots if slot.rank)
        self.down = reserved.down.new_zeros((ranks, reserved.in_features))
        self.ups = nn.Module()
        for number, run in enumerate(runs):
            first = self.slots[run.slots.start]
            up = first.up.new_zeros((run.number, first.out_features, first.rank))
            self.ups.register_buffer(f"run_{number}", up, persistent=False)

    def _follows(self, run: _Run, index: int) -> bool:
        last, slot = self.slots[run.slots.stop - 1], self.slots[index]
        return bool(
            run.slots.stop == index
            and self._pieces.keys().isdisjoint((index - 1, index))
            and run.outputs.stop == slot.outputs.start
            and (last.rank, last.out_features) == (slot.rank, slot.out_features)
        )

    def _up(self, run: int) -> torch.Tensor:
        up: torch.Tensor = getattr(self.ups, f"run_{run}")
        return up


class ConvolutionSlot(Slot):
    """A convolution within a fused block; `scaled` is `up` times `amount`, (outputs, rank, 1, 1)."""

    scaled: torch.Tensor | None

    def __init__(self, layer: nn.Conv2d) -> None:
        inputs = (layer.in_channels, *layer.kernel_size)
        super().__init__(getattr(layer, "vivace_name", ""), inputs, layer.out_channels)
        self.in_channels, self.out_channels, self.groups = layer.in_channels, layer.out_channels, layer.groups
        self.kernel_size, self.stride = layer.kernel_size, layer.stride
        self.padding, self.dilation = layer.padding, layer.dilation
        self.register_buffer("scaled", None, persistent=False)

    @property
    def slots(self) -> list[ConvolutionSlot]:
        return [self]

    def write(self) -> None:
        """Multiply by the factors, in place."""
        if not self.rank:
            return
        assert self.up is not None
        assert self.amount is not None
        scaled = (self.up.float() * self.amount)[:, :, None, None]
        if self.scaled is None or self.scaled.shape != scaled.shape:
            self.scaled = torch.empty_like(scaled, dtype=torch.bfloat16)
        self.scaled.copy_(scaled)

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in (self.down, self.scaled) if tensor is not None]

    def add(self, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        if not self.rank or x.is_meta:
            return made
        assert self.down is not None
        assert self.scaled is not None
        conv2d = nn.functional.conv2d
        inner = conv2d(
            _as_computed(x), _as_computed(self.down), None, self.stride, self.padding, self.dilation
        )
        return made.add_(conv2d(inner, _as_computed(self.scaled)))


class LoraOwner(nn.Module):
    """A module that takes diffusers' layers, for which it has slots: in `LorasBeside`, or one for each convolution."""

    takes_layers = True

    @property
    def _loras(self) -> list[Any]:
        return [part for part in self.modules() if isinstance(part, LorasBeside | ConvolutionSlot)]

    @property
    def lora_slots(self) -> list[Slot]:
        return [slot for part in self._loras for slot in part.slots]

    def write_loras(self, rescaled_to: float | None = None) -> None:
        """Take over what the slots hold: see `Product.write_loras`."""
        for part in self._loras:
            part.write()

    def lora_tensors(self) -> list[torch.Tensor]:
        return [tensor for part in self._loras for tensor in part.tensors()]


def _as_computed(x: torch.Tensor) -> torch.Tensor:
    """In bf16; on a CPU, which rounds it between operations, in fp32."""
    return x.to(torch.bfloat16) if x.is_cuda else x.float()
