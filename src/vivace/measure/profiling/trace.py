"""The events of one call, linked: what contains what, which component ran, which call launched a kernel (microseconds).

torch.profiler's own table counts a kernel several times. Here each belongs to the host event that launched it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

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
