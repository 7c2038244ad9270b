"""A LoRA file's matrices in one piece of host memory for each dtype, so that one copy moves all of them to a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vivace.machinery.lora.changes import Matrices

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 16  # elements


class PackedLayers:
    """The two matrices of each layer of a file.

    Args:
        layers: by name. They are copied.
        device: where they will be needed. For a GPU they lie in page-locked memory, if the host grants it.

    Attributes:
        rank: the largest of a layer.
    """

    def __init__(self, layers: Mapping[str, Matrices], device: torch.device) -> None:
        self.rank = max((layer.rank for layer in layers.values()), default=0)
        sizes: dict[Any, int] = {}
        starts: dict[str, tuple[int, int]] = {}
        for name, layer in layers.items():
            places = []
            for tensor in (layer.down, layer.up):
                places.append(sizes.get(tensor.dtype, 0))
                sizes[tensor.dtype] = places[-1] - (-tensor.numel() // _ALIGNMENT) * _ALIGNMENT
            starts[name] = (places[0], places[1])
        self._flat = {dtype: _host_memory(size, dtype, device) for dtype, size in sizes.items()}
        self._starts = starts
        self._layers = {
            name: self._placed(name, layer, self._flat, copies=True) for name, layer in layers.items()
        }

    @property
    def names(self) -> list[str]:
        return list(self._layers)

    @property
    def num_bytes(self) -> int:
        return sum(flat.nbytes for flat in self._flat.values())

    def on(self, device: torch.device, *, needs_values: bool = True) -> Mapping[str, Matrices]:
        """Return the matrices by name on a device: views of one copy.

        Args:
            needs_values: False: nothing is copied, and nothing returned.
        """
        if not needs_values:
            return {}
        if device.type in ("cpu", "meta"):
            return self._layers
        flat = {dtype: values.to(device, non_blocking=True) for dtype, values in self._flat.items()}
        return {name: self._placed(name, layer, flat) for name, layer in self._layers.items()}

    def _placed(
        self, name: str, layer: Matrices, flat: Mapping[Any, torch.Tensor], copies: bool = False
    ) -> Matrices:
        """Return a layer's matrices where they lie in `flat`, after they were copied there if `copies` says so."""
        placed = []
        for start, tensor in zip(self._starts[name], (layer.down, layer.up), strict=True):
            placed.append(flat[tensor.dtype][start : start + tensor.numel()].view(tensor.shape))
            if copies:
                placed[-1].copy_(tensor)
        return replace(layer, down=placed[0], up=placed[1])


def _host_memory(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    import torch

    if device.type == "cuda":
        try:
            return torch.empty(size, dtype=dtype, pin_memory=True)
        except RuntimeError:  # the host grants no more: copies are slower
            pass
    return torch.empty(size, dtype=dtype)
