"""Keys and values of the text for all blocks of a UNet, computed once for each text instead of once in each step.

They depend on the text alone, and a text stays the same over the steps. In SDXL their weights are 680 MB, which every
step would read. So one matmul makes them for all blocks before the forward, which then gets them in place of the text:
(batch, words, columns). Each transformer takes its own columns. A CUDA graph of the forward contains none of this.
In e4m3, the last columns hold the scales of the blocks' attention to the text, as fp32.

What is not computed beforehand is computed by the transformers, each for itself: see `TextHoisting`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from vivace.machinery.compilation.captured import never_written_again, num_writes
from vivace.machinery.fused.lora_columns import LoraOwner, LorasBeside
from vivace.machinery.fused.operations import Places
from vivace.machinery.fused.products import multiply
from vivace.machinery.fused.scales import scales_of_attention, spread

_AT, _NAME = 2, "encoder_hidden_states"
"""Where a UNet's forward takes the text."""
_SCALE = 8
"""Columns of a block's scale, in bf16: 16 bytes, at multiples of which cuBLASLt takes scales."""
_NUM_TEXTS = 2
"""Number of texts that are remembered: guidance may take two calls."""


@dataclass(frozen=True)
class TextShare:
    """A transformer's share: its columns of keys and values, and its blocks among those of all transformers."""

    columns: slice
    blocks: slice


class TextProjections(LoraOwner):
    """The weights of all blocks' keys and values, (columns, channels of the text), in bf16: a text has few rows.

    `fill` takes over the transformers' weights one by one, to where they are left, so that none is there twice.
    """

    def __init__(self, transformers: Sequence[Any], quantize: bool, places: Places) -> None:
        super().__init__()
        layers = [
            layer for transformer in transformers for layer in text_layers(transformer.transformer_blocks)
        ]
        columns = sum(layer.out_features for layer in layers)
        weight = torch.empty((columns, layers[0].in_features), dtype=torch.bfloat16, device=places.home)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._shares: list[TextShare] = []
        self.loras = nn.ModuleList()
        self.num_changes = 0
        # The block whose values a column is of, counted from 1; 0: it is of keys.
        block_of = torch.zeros(columns, dtype=torch.int64, device=places.home) if quantize else None
        self.register_buffer("block_of", block_of, persistent=False)

    @property
    def width(self) -> int:
        return len(self.weight) + (0 if self.block_of is None else _SCALE * self._shares[-1].blocks.stop)

    def fill(self, blocks: Any) -> TextShare:
        before = self._shares[-1] if self._shares else TextShare(slice(0, 0), slice(0, 0))
        start = end = before.columns.stop
        loras = LorasBeside()
        for layer in text_layers(blocks):
            first, end = end, end + layer.out_features
            self.weight[first:end].copy_(layer.weight.detach())
            loras.add_layer(layer, layer.in_features, slice(first - start, end - start))
        self.loras.append(loras)
        share = TextShare(slice(start, end), slice(before.blocks.stop, before.blocks.stop + len(blocks)))
        self._shares.append(share)
        if self.block_of is not None:
            numbers = 1 + torch.arange(share.blocks.start, share.blocks.stop, device=self.block_of.device)
            self.block_of[share.columns].view(len(blocks), 2, -1)[:, 1] = numbers[:, None]
        return share

    def write_loras(self, rescaled_to: float | None = None) -> None:
        self.num_changes += 1
        super().write_loras(rescaled_to)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the tensor that replaces a text: the keys and values of all blocks, and scales."""
        columns = len(self.weight)
        made = self._empty(text, self.width)
        self._multiply(text, slice(None), made[..., :columns])
        for share, loras in zip(self._shares, self.loras, strict=True):
            self._add(loras, text, made[..., share.columns])
        if self.block_of is not None:
            # For all blocks at once: the host launches these one by one, and a GPU waits for it.
            largest = torch.linalg.vector_norm(
                made[..., :columns], ord=float("inf"), dim=(0, 1), dtype=torch.float32
            )
            of_blocks = largest.new_zeros(1 + self._shares[-1].blocks.stop)
            of_blocks.scatter_reduce_(0, self.block_of, largest, "amax")
            scales = spread(scales_of_attention(of_blocks[1:])).flatten().view(torch.bfloat16)
            made[..., columns:] = scales  # of each image, which may be sent to a process of its own
        return made

    def of(self, text: torch.Tensor, share: TextShare) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a transformer's keys and values, (batch, words, columns), and its blocks' scales (blocks, 1), if
        known."""
        if not self.are_in(text):
            made = self._empty(text, share.columns.stop - share.columns.start)
            self._multiply(text, share.columns, made)
            return self._add(self.loras[self._shares.index(share)], text, made), None
        scales = None if self.block_of is None else self._scales(text)[share.blocks, :1]
        return text[..., share.columns], scales

    def _scales(self, made: torch.Tensor) -> torch.Tensor:
        """Return the columns that hold scales, (blocks, 4), in fp32: each the first of four."""
        return made[0, 0, len(self.weight) :].view(torch.float32).view(-1, 4)

    def _empty(self, text: torch.Tensor, columns: int) -> torch.Tensor:
        return torch.empty((*text.shape[:2], columns), dtype=torch.bfloat16, device=self.weight.device)

    def _multiply(self, text: torch.Tensor, columns: slice, out: torch.Tensor) -> torch.Tensor:
        rows = text.bfloat16().flatten(0, 1).contiguous()
        if out.is_meta:
            torch.ops.vivace.fused_product(rows, self.weight[columns], out.flatten(0, 1))
        else:
            multiply(rows, self.weight[columns], (), None, out.flatten(0, 1))
        return out

    def _add(self, loras: Any, text: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        loras.add(text.bfloat16().flatten(0, 1), made.flatten(0, 1))
        return made

    def are_in(self, text: torch.Tensor) -> bool:
        return not self.takes(text) and text.shape[-1] == self.width

    def takes(self, text: torch.Tensor) -> bool:
        return bool(text.shape[-1] == self.weight.shape[1])


@dataclass(frozen=True)
class _Known:
    """A text (a weak reference, so that the entry goes with it), the count of writes to it, and its keys and values."""

    text: weakref.ref[torch.Tensor]
    version: int | None
    projected: torch.Tensor


class TextHoisting:
    """Gives a UNet the keys and values of its text: a hook in front of the forward.

    A text is known by its object and the count of writes to it. Without one, in inference mode, a change between two
    steps would be unseen; such texts, and those on another device, are left to the transformers. accelerate's hook,
    which onloads the UNet, is called here: it would run later.
    """

    def __init__(self, projections: TextProjections) -> None:
        self.num_projected = 0
        self._projections = projections
        self._known: list[_Known] = []
        self._weights: tuple[StorageWeakRef, int | None, int] | None = None
        """What the known ones were computed with: the weight's memory, and the counts of writes to it and to LoRAs."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": [], "_weights": None}

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if (hook := getattr(module, "_hf_hook", None)) is not None:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        if len(args) > _AT:
            return (*args[:_AT], self._projected(args[_AT]), *args[_AT + 1 :]), kwargs
        if _NAME in kwargs:
            return args, kwargs | {_NAME: self._projected(kwargs[_NAME])}
        return args, kwargs

    def _projected(self, text: Any) -> Any:
        weight = self._projections.weight
        if (
            not torch.is_tensor(text)
            or text.ndim != 3
            or self._projections.width == weight.shape[1]  # nobody could tell the two apart
            or not self._projections.takes(text)
            or text.device != weight.device
            or text.is_inference()
        ):
            return text
        storage = StorageWeakRef(weight.untyped_storage())
        weights = storage, num_writes(weight), self._projections.num_changes
        version = num_writes(text)
        if weights != self._weights:  # moved, such as offloaded and back, or changed
            self._known, self._weights = [], weights
        for projection in self._known:
            if projection.text() is text and projection.version == version:
                return projection.projected
        with torch.no_grad():
            projected = never_written_again(self._projections(text))
        self.num_projected += 1
        # Also an earlier state of the same text goes.
        others = [projection for projection in self._known if projection.text() is not text]
        reference = weakref.ref(text, self._forget)
        self._known = [*others[1 - _NUM_TEXTS :], _Known(reference, version, projected)]
        return projected

    def _forget(self, reference: weakref.ref[torch.Tensor]) -> None:
        self._known = [projection for projection in self._known if projection.text is not reference]


def text_layers(blocks: Any) -> Iterator[Any]:
    """Yield the layers of diffusers' blocks that compute keys and values of the text, in the order of their columns."""
    for block in blocks:
        attention = block.attn2
        fused = getattr(attention, "to_kv", None)
        yield from (fused,) if fused is not None else (attention.to_k, attention.to_v)


def why_read_otherwise(unet: Any) -> str | None:
    """Return why a UNet's forward needs the text itself, besides its keys and values, or None."""
    kind = getattr(unet.config, "addition_embed_type", None)
    if kind in ("text", "text_image"):
        return f"this UNet adds the text to its time embedding ({kind}), and the fused blocks give it keys and values"
    widths, in_blocks = set(), set()
    for part in unet.modules():
        if type(part).__name__ == "BasicTransformerBlock":
            in_blocks |= {id(part.attn1), id(part.attn2)}
            widths |= {layer.in_features for layer in text_layers([part])}
    for name, part in unet.named_modules():
        apart = type(part).__name__ == "Attention" and id(part) not in in_blocks
        if apart and (part.is_cross_attention or part.added_kv_proj_dim is not None):
            return f"{name}: attention to the text outside of a transformer block, which has no fused form"
    return "its blocks read texts of several widths" if len(widths) > 1 else None
