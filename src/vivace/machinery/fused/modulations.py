"""FLUX's modulations: shifts, scales and gates of all blocks, which depend on time, guidance and the pooled text alone.

Their Linear layers hold 3.25 of FLUX's 11.9 billion weights, and read in every step they cost 1.5 ms of it (bf16, one
H200). So they are computed before the first step, for all timesteps of the scheduler at once: one pass over the weight.

A forward cannot know on the host which step it computes without waiting for the GPU. So the results are kept in a table
on the device, under what they were computed from: timestep, guidance and pooled text themselves, not their names. Each
forward looks its own up there. What is not found is computed, also without the host: a kernel reads from the device
whether it is needed. So a wrong guess of the pipeline's next steps costs time, and nothing else.

The table moves with the weights: where they are offloaded, it leaves the device with them, and comes back empty. That
costs a copy, and no work: a call has timesteps of its own, so its rows are computed anew in any case.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from vivace.machinery.fused.lora_columns import LoraOwner, LorasBeside
from vivace.machinery.fused.operations import Places, has_triton, takes_kernels
from vivace.machinery.kernels.reference import quantize_rows

OF_DOUBLE, OF_SINGLE = 12, 3
"""Vectors of modulations of a block: six each of the image and of the text, in this order; three of a single block."""

CAPACITY = 64
"""Rows of the table: 2.1 MB each for FLUX.1."""


class Modulations(LoraOwner):
    """The Linear layers of all modulations as one, and the table, with keys of `num_inputs` (timestep, guidance and
    pooled text), for `num_guided` rows of an image. `num_computed` counts forwards that did not find their rows, on the
    device; a buffer would lose it when weights are offloaded."""

    def __init__(
        self,
        num_outputs: int,
        channels: int,
        quantize: bool,
        num_inputs: int,
        places: Places,
        num_guided: int = 1,
    ) -> None:
        super().__init__()
        device, dtype = places.home, torch.float8_e4m3fn if quantize else torch.bfloat16
        weight = torch.empty((num_outputs, channels), dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        scale = torch.empty(num_outputs, device=device) if quantize else None
        self.register_buffer("scale", scale)
        self.register_buffer("bias", torch.empty(num_outputs, dtype=torch.bfloat16, device=device))
        rows = capacity_on(places.work) * num_guided
        # No timestep is nan, so nothing is found in an empty table.
        keys = torch.full((rows, num_inputs), float("nan"), device=device)
        table = torch.zeros((rows, num_outputs), dtype=torch.bfloat16, device=device)
        self.register_buffer("keys", keys, persistent=False)
        self.register_buffer("table", table, persistent=False)
        self.num_computed = torch.zeros((), dtype=torch.int64, device=places.work)
        self.loras = LorasBeside()

    def fill(self, start: int, layer: nn.Linear) -> int:
        """Take over a layer's weights as the outputs from `start` on; return where they end."""
        end: int = start + layer.out_features
        self._write(start, layer.weight, layer.bias)
        self.loras.add_layer(layer, layer.in_features, slice(start, end))
        return end

    def fill_apart(self, layer: nn.Linear, pieces: list[tuple[slice, int]]) -> None:
        """Take over a layer's weights, whose outputs are not side by side: `pieces` of them, and where each starts."""
        for piece, start in pieces:
            self._write(start, layer.weight[piece], layer.bias[piece])
        self.loras.add_layer(layer, layer.in_features, slice(0, layer.out_features), pieces)

    def fill_zeros(self, start: int, number: int) -> None:
        self._write(start, self.weight.new_zeros((number, self.weight.shape[1]), dtype=torch.bfloat16))

    def _write(self, start: int, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        weight, span = weight.detach(), slice(start, start + len(weight))
        if self.scale is None or weight.is_meta:
            self.weight[span].copy_(weight)
        else:
            values, scale = quantize_rows(weight)
            self.weight[span].copy_(values)
            self.scale[span].copy_(scale[:, 0])
        self.bias[span].copy_(self.bias.new_zeros(()) if bias is None else bias.detach())

    def write_loras(self, rescaled_to: float | None = None) -> None:
        """Take over what the slots hold, and empty the table, in place."""
        super().write_loras(rescaled_to)
        self.keys.fill_(float("nan"))

    def lora_tensors(self) -> list[torch.Tensor]:
        return [*super().lora_tensors(), *([self.keys] if len(self.keys) else [])]

    def compute(
        self, embedding: torch.Tensor, skip: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return modulations (rows, outputs) of embeddings (rows, channels), bf16; undefined where `skip` is set."""
        inputs = nn.functional.silu(embedding).bfloat16().contiguous()
        if out is None:
            out = self.bias.new_empty((len(inputs), len(self.bias)))
        if inputs.is_meta:
            return out
        if not takes_kernels(inputs):
            weight = self.weight.float() if self.scale is None else self.weight.float() * self.scale[:, None]
            made = inputs.float() @ weight.t() + self.bias.float()
            self.loras.add(inputs, made)
            return out.copy_(made)
        from vivace.machinery.kernels.skinny_product import MAX_ROWS, skinny_product

        for start in range(0, len(inputs), MAX_ROWS):
            span = slice(start, start + MAX_ROWS)
            skinny_product(inputs[span], self.weight, self.scale, self.bias, out[span], skip)
        self.loras.add(inputs, out)
        return out

    def forward(self, conditions: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Return the modulations (batch, outputs) of embeddings, from the table where it has `conditions`."""
        if not len(self.table):
            return self.compute(embedding)
        same = (conditions[:, None] == self.keys[None]).all(dim=-1)
        is_same, at = same.to(torch.int32).max(dim=-1)
        is_same = is_same.bool()
        skip = is_same.all().reshape(1).to(torch.int32)
        computed = self.compute(embedding, skip)
        if self.num_computed.device != skip.device:  # someone has moved the model
            self.num_computed = self.num_computed.to(skip.device)
        self.num_computed += 1 - skip[0]
        return torch.where(is_same[:, None], self.table.index_select(0, at), computed)

    def remember(self, start: int, conditions: torch.Tensor, embedding: torch.Tensor) -> None:
        """Compute rows and put them into the table from row `start` on."""
        span = slice(start, start + len(conditions))
        self.compute(embedding, out=self.table[span])
        self.keys[span] = conditions


def capacity_on(device: torch.device) -> int:
    """Return the rows of the table on this device: none on a CPU, where no time is won by reading a weight once."""
    return CAPACITY if device.type == "meta" or (device.type != "cpu" and has_triton()) else 0


def _is_of(value: torch.Tensor | None, seen: torch.Tensor | None) -> bool:
    """Whether a tensor is another one, or rows of it, as where guidance has ended and its rows are cut off."""
    return value is seen or (value is not None and seen is not None and value._base is seen)


class Hoisting:
    """Fills the table when a pipeline's call begins: a hook in front of the transformer's forward.

    A call's objects tell whether it begins: the pooled text, the guidance and the scheduler's timesteps. With true
    guidance two pooled texts alternate, so the last few are remembered. accelerate's hook, which onloads the
    transformer, would run later, within the forward. So it is called here; the second time it does nothing.

    Args:
        inputs_of: returns what the table is searched for and the embeddings (see `Modulations.forward`).
        reads_text: whether a pooled text is among the inputs; else a row of the table does for a whole batch.
        with_zero: tokens that stay are modulated by a timestep of 0.
        whole: the timestep of pure noise, as the pipeline counts it for the scheduler, over that for its transformer.
    """

    def __init__(
        self,
        pipe: Any,
        modulations: Any,
        inputs_of: Any,
        reads_text: bool = True,
        with_zero: bool = False,
        whole: int = 1000,
    ) -> None:
        self.num_hoisted = 0
        self._reads_text, self._with_zero, self._whole = reads_text, with_zero, whole
        self._pipe = pipe
        self._modulations = modulations
        self._inputs_of = inputs_of
        self._seen: list[tuple[tuple[Any, ...], slice]] = []
        self._next = 0
        self._filled: tuple[StorageWeakRef, int] | None = None
        """The table's memory when it was filled, and how often LoRAs had changed."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave the pipeline out: a copy of the transformer in another process hoists nothing."""
        return self.__dict__ | {"_pipe": None, "_seen": [], "_next": 0, "_filled": None}

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if (hook := getattr(module, "_hf_hook", None)) is not None:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        self._fill(args, kwargs)
        return args, kwargs

    def _fill(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        timesteps = getattr(getattr(self._pipe, "scheduler", None), "timesteps", None)
        hidden, timestep, pooled, guidance = (
            kwargs.get(name) for name in ("hidden_states", "timestep", "pooled_projections", "guidance")
        )
        if args or hidden is None or timestep is None or timesteps is None:
            return
        if self._reads_text and pooled is None:
            return
        rows = 1 if pooled is None else len(pooled)
        count = (len(timesteps) + self._with_zero) * rows
        home = self._modulations.weight.device
        if count > len(self._modulations.table) or not timesteps.device == timestep.device == home:
            return
        # Where weights were offloaded and came back, the table is empty. Its address may be the same by chance.
        storage = StorageWeakRef(self._modulations.table.untyped_storage())
        state = storage, self._modulations.loras.num_changes
        if self._filled is None or self._filled != state:
            self._seen, self._next, self._filled = [], 0, state
        objects = (timesteps, pooled, guidance)
        if any(all(map(_is_of, objects, inputs)) for inputs, _ in self._seen):
            return
        with torch.no_grad():
            times = timesteps.to(timestep.dtype) / self._whole  # as pipelines write it
            if self._with_zero:
                times = torch.nn.functional.pad(times, (0, 1))
            num_times = len(times)
            times = times.repeat_interleave(rows)
            guidances = None if guidance is None else guidance.repeat(num_times)
            texts = None if pooled is None else pooled.repeat(num_times, 1)
            conditions, embedding = self._inputs_of(times, guidances, texts, hidden.dtype)
            if self._next + count > len(self._modulations.table):
                self._next = 0
            span = slice(self._next, self._next + count)
            self._seen = [(o, s) for o, s in self._seen if s.stop <= span.start or s.start >= span.stop]
            self._modulations.remember(span.start, conditions, embedding)
        self._seen.append((objects, span))
        self._next = span.stop
        self.num_hoisted += count
