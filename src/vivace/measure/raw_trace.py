"""Which attention kernels ran, and how long the GPU worked: events of a torch.profiler trace.

They are read from the profiler's own list: `trace.events()` makes a Python object of each and sorts them into a tree,
which for the 190,000 events of an image of SDXL takes longer than the image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

_DISPATCHER = (
    "aten::scaled_dot_product_attention"  # the public function, which encloses the kernel that it picks
)
_MARKS = ("scaled_dot_product", "vivace::")  # PyTorch's kernels; kernels that techniques redirect calls to
_RANGE = "vivace component "


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


def attention_kernels(parts: Mapping[str, Any], call: Callable[[], Any]) -> list[str]:
    """Trace `call` (one short pipeline call) and return the attention operators that ran.

    Args:
        parts: modules by name, e.g. {"denoiser": pipe.unet, "vae": pipe.vae.decoder}.

    Returns:
        "denoiser: NAME xCOUNT" for operators inside a module's forward, "elsewhere: ..." for all others (text
        encoders). Operators that a compiled graph has replaced with its own kernels are not listed.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    with ExitStack() as stack:
        for name, part in parts.items():
            stack.enter_context(_ranged(name, part))
        trace = stack.enter_context(profile(activities=[ProfilerActivity.CPU]))
        call()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    counts: dict[str, int] = {}
    around: list[RawHostEvent] = []
    for event in host_events(trace):
        is_range = event.name.startswith(_RANGE)
        if not is_range and not _is_kernel(event.name):
            continue
        while around and not around[-1].encloses(event):
            around.pop()
        inner = around[-1].name if around else f"{_RANGE}elsewhere"
        around.append(event)
        if is_range or _is_kernel(inner):
            continue  # the latter is called by a kernel
        where = inner.removeprefix(_RANGE)
        name = f"{where}: {event.name.removeprefix('aten::').removeprefix('vivace::')}"
        counts[name] = counts.get(name, 0) + 1
    return [f"{name} x{count}" for name, count in sorted(counts.items())]


def _is_kernel(name: str) -> bool:
    return any(mark in name for mark in _MARKS) and not name.endswith(_DISPATCHER)


@contextmanager
def _ranged(name: str, part: Any) -> Iterator[None]:
    """Label the module's forward in traces inside the context."""
    from torch.profiler import record_function

    forward = part.forward

    def ranged(*args: Any, **kwargs: Any) -> Any:
        with record_function(_RANGE + name):
            return forward(*args, **kwargs)

    part.forward = ranged
    try:
        yield
    finally:
        part.forward = forward
