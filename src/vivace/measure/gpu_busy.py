"""Measure how long the GPU is busy during a call; the rest of the wall-clock time it waits for the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from vivace.measure.raw_trace import ranges_on


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
