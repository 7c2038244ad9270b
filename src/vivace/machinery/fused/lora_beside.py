"""LoRAs beside layers that read the same few rows (a text, embeddings of time), and beside convolutions.

Such products take little of a step, or are computed once for many steps, so B A x is added to their output instead of
being a part of them: their weights stay as they are, in any precision. All A are one matmul, and B of layers of one
size that follow each other are one batched matmul. Buffers are written in place, so that CUDA graphs read the new ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vivace.machinery.fused.lora_columns import LoraSlot, Slot


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
