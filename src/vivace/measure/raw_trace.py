"""Events of a torch.profiler trace, read from the profiler's own list.

`trace.events()` makes a Python object of each and sorts them into a tree, which for the 190,000 events of an image of
SDXL takes longer than the image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class RawHostEvent(NamedTuple):
    """An operator or a label on the host; times in nanoseconds."""

    name: str
    thread: int
    start: int
    end: int

    def encloses(self, other: RawHostEvent) -> bool:
        return self.thread == other.thread and self.start <= other.start and other.end <= self.end


def host_events(trace: Any) -> list[RawHostEvent]:
    """Return the host's events, those of a thread in order, each before what it encloses."""
    from torch.autograd import DeviceType

    events = [
        RawHostEvent(
            event.name(), event.start_thread_id(), event.start_ns(), event.start_ns() + event.duration_ns()
        )
        for event in _events(trace)
        if event.device_type() == DeviceType.CPU
    ]
    return sorted(events, key=lambda event: (event.thread, event.start, -event.end))


def ranges_on(device: Any, trace: Any) -> list[tuple[int, int]]:
    """Return start and end, in nanoseconds, of all events on a kind of device (`torch.autograd.DeviceType`)."""
    return [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in _events(trace)
        if event.device_type() == device
    ]


def _events(trace: Any) -> Any:
    return trace.profiler.kineto_results.events()


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


def covered(ranges: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of ranges."""
    return sum(end - start for start, end in union(ranges))


def union(ranges: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of ranges, in order and apart from each other."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
