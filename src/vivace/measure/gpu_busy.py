"""Measure how long the GPU is busy during a call: what is left of the wall-clock time is waiting for the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def gpu_busy_s(call: Callable[[], Any]) -> float | None:
    """Return the seconds in which this process's GPU works on kernels, copies or memsets during a call.

    Work that overlaps on several streams counts once. Only the GPU is traced, so the host is hardly slower than usual.
    None if the driver does not let this process trace.
    """
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    ranges = ranges_on(DeviceType.CUDA, trace)
    return covered(ranges) / 1e9 if ranges else None


def ranges_on(device: Any, trace: Any) -> list[tuple[int, int]]:
    """Return start and end, in nanoseconds, of all that a torch.profiler trace has of a kind of device.

    Read from the profiler's own list: `trace.events()` makes Python objects of it and sorts them into a tree, which for
    the 190,000 events of an image of SDXL takes longer than the image.
    """
    events = trace.profiler.kineto_results.events()
    return [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == device
    ]


def covered(ranges: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of ranges."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(ranges):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
