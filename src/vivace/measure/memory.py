"""Memory of the model and of the call, in bytes.

On GPUs it is the allocator's exact count, after loading and at the peak of the measured calls. MPS has no peak, so
there it is the memory that the driver has given the process. On CPUs there is no such count, so it is the process's
resident set, including Python and its libraries; `before_bytes` is its size before the model was loaded.
"""

from __future__ import annotations

from typing import Any

from vivace.foundation.processes.system import peak_resident_bytes, reset_resident_peak
from vivace.foundation.spec.record import Memory
from vivace.machinery.technique import COMPONENTS, component_of
from vivace.measure.accelerator import allocated_bytes, has_peak, peak_bytes, reset_peak


class MemoryMeter:
    """Memory of the model and of the call. Create it before loading; call `loaded` after the recipe, `read` last."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._before = self._now()
        self._model = 0
        self._weights = 0

    def loaded(self, pipe: Any) -> None:
        self._model = self._now()
        self._weights = weights_bytes(pipe)

    def start_peak(self) -> None:
        """Reset the peak, so that it does not include loading and compiling."""
        if self._device != "cpu":
            reset_peak(self._device)
        else:
            reset_resident_peak()

    def read(self) -> Memory:
        return Memory(
            kind=self._kind(),
            before_bytes=self._before,
            model_bytes=self._model,
            peak_bytes=max(self._peak(), self._model),
            weights_bytes=self._weights,
        )

    def _kind(self) -> str:
        if self._device == "cpu":
            return "process resident set"
        return "device memory allocated" if has_peak(self._device) else "device memory given by the driver"

    def _now(self) -> int:
        if self._device != "cpu":
            return allocated_bytes(self._device)
        import psutil

        return int(psutil.Process().memory_info().rss)

    def _peak(self) -> int:
        if self._device != "cpu":
            return peak_bytes(self._device)
        return peak_resident_bytes()


def weights_bytes(pipe: Any) -> int:
    """Return the bytes of all parameters and buffers of the pipeline's components; shared ones count once.

    Of a storage that is used for other data too (a mapped file, pinned memory), only their share counts.
    """
    spans: dict[int, tuple[int, set[tuple[int, int]]]] = {}
    for component in COMPONENTS:
        module = component_of(pipe, component)
        if module is None:
            continue
        for tensor in [*module.parameters(), *module.buffers()]:
            for part in plain_tensors(tensor):
                storage = part.untyped_storage()
                # By the storage's address: tensors without data (offloaded ones) have no data pointer.
                _, ranges = spans.setdefault(storage._cdata, (storage.nbytes(), set()))
                size = part.element_size()
                ranges.add((part.storage_offset() * size, part.numel() * size))
    return sum(min(whole, sum(size for _, size in ranges)) for whole, ranges in spans.values())


def plain_tensors(tensor: Any) -> list[Any]:
    """Return the plain tensors that a quantised weight (a tensor subclass) consists of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor, *_bitsandbytes_scales(tensor)]
    names = flatten()[0]
    return [part for name in names for part in plain_tensors(getattr(tensor, name))]


def _bitsandbytes_scales(tensor: Any) -> list[Any]:
    """Return the scales that bitsandbytes stores as attributes of a weight, including scales of scales."""
    import torch

    state = getattr(tensor, "quant_state", None)
    second = getattr(state, "state2", None)
    held = [getattr(tensor, "SCB", None), getattr(state, "offset", None)]
    held += [getattr(each, name, None) for each in (state, second) for name in ("absmax", "code")]
    return [part for part in held if isinstance(part, torch.Tensor)]
