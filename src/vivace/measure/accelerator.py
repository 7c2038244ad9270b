"""Differences between GPU makers in timing calls and reading memory.

`device` is torch's type of device everywhere: "cpu", "cuda" (AMD's GPUs too), "xpu" or "mps".
"""

from __future__ import annotations

from typing import Any

GPUS = ("cuda", "xpu", "mps")
"""Types of GPU in the order of preference."""


def available_gpu() -> str | None:
    """Return the type of GPU that this PyTorch can use, None if there is none."""
    return next((device for device in GPUS if is_available(device)), None)


def is_available(device: str) -> bool:
    import torch

    if device == "mps":
        return bool(torch.backends.mps.is_available())
    module = getattr(torch, device, None)
    return module is not None and bool(module.is_available())


def synchronise(device: str) -> None:
    """Wait until the device has finished its work."""
    if device != "cpu":
        _module(device).synchronize()


def recorded_event(device: str) -> Any:
    """Return an event that the GPU reaches after all earlier work; `elapsed_time` between two is in milliseconds."""
    module = _module(device)
    event = (module.event if device == "mps" else module).Event(enable_timing=True)
    event.record()
    return event


def empty_cache(device: str) -> None:
    """Give the allocator's free memory back to the driver."""
    if device != "cpu":
        _module(device).empty_cache()


def allocated_bytes(device: str) -> int:
    """Return the GPU memory in use by tensors."""
    module = _module(device)
    return int(module.current_allocated_memory() if device == "mps" else module.memory_allocated())


def has_peak(device: str) -> bool:
    """Whether the allocator knows its highest use. MPS's does not."""
    return device in ("cuda", "xpu")


def reset_peak(device: str) -> None:
    """Forget the highest use, where it is counted; on MPS release free memory, so that old pools do not count."""
    module = _module(device)
    if has_peak(device):
        module.reset_peak_memory_stats()
    else:
        module.empty_cache()


def peak_bytes(device: str) -> int:
    """Return the highest use since `reset_peak`; on MPS the size of the driver's pool, which only grows."""
    module = _module(device)
    return int(module.max_memory_allocated() if has_peak(device) else module.driver_allocated_memory())


def _module(device: str) -> Any:
    import torch

    return getattr(torch, device)
