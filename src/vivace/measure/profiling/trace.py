"""The events of one call, linked: what contains what, which component ran, which call launched a kernel.

Times are microseconds. torch.profiler's own table counts a kernel for the operator that launched it, again under its
own name, and once more under every label that spans it on the GPU's timeline, so that percentages exceed 100. Here
labels of the GPU's timeline are left out, and each kernel belongs to the host event that launched it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LABEL = "vivace "
"""Prefix of vivace's own labels: "vivace call", "vivace component denoiser"."""
CALL_LABEL = LABEL + "call"
COMPONENT_LABEL = LABEL + "component "
OTHER_COMPONENT = "other"
_COMPILING = (
    "InductorBenchmarker", "CachingAutotuner.benchmark", "benchmark_all_configs", "AlgorithmSelectorCache",
    "compile_inner", "fx_codegen_and_compile", "dynamo_timed", "entire_frame_compile", "create_aot_dispatcher",
)  # fmt: skip


@dataclass(eq=False, slots=True)
class HostEvent:
    """An operator, a CUDA call or a label on a thread of the host.

    Attributes:
        kind: "operator", "cuda" or "label" (one of vivace's own).
        correlation: number that a CUDA call shares with what it starts on a GPU.
        component: what was running: a component's name, or "other".
    """

    name: str
    kind: str
    start: float
    end: float
    thread: int
    correlation: int | None = None
    parent: HostEvent | None = None
    self_us: float = 0.0
    component: str = OTHER_COMPONENT

    def ancestors(self) -> Iterator[HostEvent]:
        """Yield the events that contain this one, the innermost first, without vivace's labels."""
        event = self.parent
        while event is not None:
            if event.kind != "label":
                yield event
            event = event.parent

    def path(self) -> list[str]:
        """Return the names of the operators around it and its own, the outermost first; CUDA calls are left out."""
        around = [event.name for event in (self, *self.ancestors()) if event.kind == "operator"]
        return around[::-1]


@dataclass(eq=False, slots=True)
class DeviceEvent:
    """A kernel, copy or memset on a GPU; `launch` is the host event that started it, None if the trace lacks it."""

    name: str
    start: float
    end: float
    correlation: int | None = None
    launch: HostEvent | None = None

    @property
    def component(self) -> str:
        return OTHER_COMPONENT if self.launch is None else self.launch.component


class MemoryEvent(NamedTuple):
    """An allocation (positive bytes) or a free. `total` is the allocator's count at that time."""

    at: float
    num_bytes: int
    address: int
    total: int
    is_cuda: bool


@dataclass
class Trace:
    """The events of one call, from its start until host and GPU have finished.

    Attributes:
        host: in order of start, by thread; labels included.
        compiling: names of events which show that something was compiled or tuned inside the call.
    """

    start: float
    end: float
    host: list[HostEvent] = field(default_factory=list)
    device: list[DeviceEvent] = field(default_factory=list)
    memory: list[MemoryEvent] = field(default_factory=list)
    compiling: list[str] = field(default_factory=list)


def trace_of(
    host: Iterable[HostEvent], device: Iterable[DeviceEvent], memory: Iterable[MemoryEvent]
) -> Trace:
    """Return the profiled call from all events of a profile, in any order, without labels of the GPU's timeline."""
    every = list(host)
    call = next((event for event in every if event.name == CALL_LABEL), None)
    if call is None:
        raise ValueError(f"the trace has no event {CALL_LABEL!r}")
    inside = [event for event in every if event.start >= call.start and event.end <= call.end]
    inside.sort(key=lambda event: (event.thread, event.start, -event.end))
    _nest(inside)
    trace = Trace(call.start, call.end, inside)
    _name_components(inside, component_at(trace))
    launches = {event.correlation: event for event in inside if event.correlation is not None}
    for event in device:
        event.launch = None if event.correlation is None else launches.get(event.correlation)
        # The device's clock is not the host's to the microsecond, so the launch decides where there is one.
        if event.launch is not None or call.start <= event.start < call.end:
            trace.device.append(event)
    trace.device.sort(key=lambda event: event.start)
    trace.end = max([call.end, *(event.end for event in trace.device)])
    trace.memory = sorted(
        (event for event in memory if call.start <= event.at <= trace.end), key=lambda event: event.at
    )
    names = dict.fromkeys(event.name for event in inside)
    trace.compiling = [name for name in names if any(mark in name for mark in _COMPILING)]
    return trace


def _nest(events: list[HostEvent]) -> None:
    """Find each event's parent on its thread, and its self time."""
    stack: list[HostEvent] = []
    for event in events:
        while stack and (stack[-1].thread != event.thread or stack[-1].end <= event.start):
            stack.pop()
        event.self_us = event.end - event.start
        if stack:
            parent = event.parent = stack[-1]
            # Clocks may let a child end after its parent.
            parent.self_us -= min(event.end, parent.end) - event.start
        stack.append(event)
    for event in events:
        event.self_us = max(0.0, event.self_us)


def _name_components(events: list[HostEvent], spans: list[tuple[float, float, str]]) -> None:
    """Name the component of each event: from the label around it; on other threads, from the component at that time."""
    index, last_thread = 0, None
    for event in events:
        if event.thread != last_thread:
            index, last_thread = 0, event.thread
        while index < len(spans) and spans[index][1] <= event.start:
            index += 1
        if index < len(spans) and spans[index][0] <= event.start:
            event.component = spans[index][2]


def component_at(trace: Trace) -> list[tuple[float, float, str]]:
    """Return (start, end, component) of each time that a component ran, in order."""
    return sorted(
        (event.start, event.end, event.name.removeprefix(COMPONENT_LABEL))
        for event in trace.host
        if event.kind == "label" and event.name.startswith(COMPONENT_LABEL)
    )


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
    """Return the seconds in which this process's GPU works on kernels, copies or memsets during a call. Work that
    overlaps on several streams counts once. Only the GPU is traced, so the host is hardly slower than usual. None if
    the driver does not let this process trace."""
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
    """Trace one short pipeline call; return the attention operators that ran by part, as "denoiser: NAME x20".

    Those outside of the parts (text encoders) are "elsewhere"; those that a compiled graph replaces are not listed.
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
