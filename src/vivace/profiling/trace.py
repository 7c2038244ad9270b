"""Read the events of a Chrome trace that torch.profiler wrote. Times are microseconds.

torch.profiler's own table counts a kernel for the operator that launched it, again under its own name, and once more
under every label that spans it on the GPU's timeline, so that percentages exceed 100. Here labels of the GPU's timeline
are left out, and each kernel belongs to the host event that launched it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

LABEL = "vivace "
"""Begins the names of vivace's own labels: "vivace call", "vivace component denoiser"."""
CALL_LABEL = LABEL + "call"
COMPONENT_LABEL = LABEL + "component "
OTHER_COMPONENT = "other"

_HOST = {"cpu_op": "operator", "user_annotation": "operator", "cuda_runtime": "cuda", "cuda_driver": "cuda"}
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_COMPILING = (
    "InductorBenchmarker", "CachingAutotuner.benchmark", "benchmark_all_configs", "AlgorithmSelectorCache",
    "compile_inner", "fx_codegen_and_compile", "dynamo_timed", "entire_frame_compile", "create_aot_dispatcher",
)  # fmt: skip


@dataclass(eq=False)
class HostEvent:
    """An operator, a CUDA call or a label on a thread of the host.

    Attributes:
        kind: "operator", "cuda" or "label" (one of vivace's own).
        component: what was running: a component's name, or "other".
    """

    name: str
    kind: str
    start: float
    end: float
    thread: object
    correlation: int | None = None
    parent: HostEvent | None = None
    self_us: float = 0.0
    component: str = OTHER_COMPONENT

    def ancestors(self) -> Iterator[HostEvent]:
        """Yield the events that this one is inside of, the innermost first, without vivace's labels."""
        found = self.parent
        while found is not None:
            if found.kind != "label":
                yield found
            found = found.parent

    def path(self) -> list[str]:
        """Return the names of the operators around it and its own, the outermost first; CUDA calls are left out."""
        around = [one.name for one in (self, *self.ancestors()) if one.kind == "operator"]
        return around[::-1]


@dataclass(eq=False)
class DeviceEvent:
    """A kernel, copy or memset on a GPU; `launch` is the host event that started it, None if the trace lacks it."""

    name: str
    start: float
    end: float
    num_bytes: int = 0
    launch: HostEvent | None = None

    @property
    def component(self) -> str:
        return OTHER_COMPONENT if self.launch is None else self.launch.component


@dataclass(frozen=True)
class MemoryEvent:
    """An allocation (positive bytes) or a free. `total` is what the allocator then held, as it counts."""

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


def read_trace(events: Iterable[Mapping[str, Any]]) -> Trace:
    """Return the profiled call from the `traceEvents` of a Chrome trace.

    Raises:
        ValueError: the trace has no call.
    """
    host: list[HostEvent] = []
    device: list[tuple[DeviceEvent, int | None]] = []
    memory: list[MemoryEvent] = []
    for event in events:
        category = str(event.get("cat", ""))
        args = event.get("args") or {}
        if category in _HOST and event.get("ph") == "X":
            host.append(_host_event(event, category, args))
        elif category in _DEVICE:
            start = float(event["ts"])
            found = DeviceEvent(
                str(event["name"]), start, start + float(event["dur"]), int(args.get("bytes") or 0)
            )
            device.append((found, args.get("correlation")))
        elif category == "cpu_instant_event" and event.get("name") == "[memory]":
            memory.append(_memory_event(event, args))
    call = next((event for event in host if event.name == CALL_LABEL), None)
    if call is None:
        raise ValueError(f"the trace has no event {CALL_LABEL!r}")
    inside = [event for event in host if event.start >= call.start and event.end <= call.end]
    _nest(inside)
    _name_components(inside, call)
    launches = {event.correlation: event for event in inside if event.correlation is not None}
    trace = Trace(call.start, call.end, inside)
    for found, correlation in device:
        found.launch = None if correlation is None else launches.get(correlation)
        # The device's clock is not the host's to the microsecond, so the launch decides where there is one.
        if found.launch is not None or call.start <= found.start < call.end:
            trace.device.append(found)
    trace.device.sort(key=lambda found: found.start)
    trace.end = max([call.end, *(found.end for found in trace.device)])
    trace.memory = sorted(
        (one for one in memory if call.start <= one.at <= trace.end), key=lambda one: one.at
    )
    names = dict.fromkeys(event.name for event in inside)
    trace.compiling = [name for name in names if any(mark in name for mark in _COMPILING)]
    return trace


def _host_event(event: Mapping[str, Any], category: str, args: Mapping[str, Any]) -> HostEvent:
    name, start = str(event["name"]), float(event["ts"])
    return HostEvent(
        name=name,
        kind="label" if name.startswith(LABEL) else _HOST[category],
        start=start,
        end=start + float(event.get("dur", 0)),
        thread=event.get("tid"),
        correlation=args.get("correlation") if category.startswith("cuda") else None,
    )


def _memory_event(event: Mapping[str, Any], args: Mapping[str, Any]) -> MemoryEvent:
    return MemoryEvent(
        at=float(event["ts"]),
        num_bytes=int(args.get("Bytes", 0)),
        address=int(args.get("Addr", 0)),
        total=int(args.get("Total Allocated", 0)),
        is_cuda=args.get("Device Type") == 1,
    )


def _nest(events: list[HostEvent]) -> None:
    """Find each event's parent on its thread, and the time that belongs to no child of it."""
    events.sort(key=lambda event: (str(event.thread), event.start, -event.end))
    stack: list[HostEvent] = []
    for event in events:
        while stack and (stack[-1].thread != event.thread or stack[-1].end <= event.start):
            stack.pop()
        event.self_us = event.end - event.start
        if stack:
            event.parent = stack[-1]
            # Rounding may let a child end after its parent.
            event.parent.self_us -= min(event.end, event.parent.end) - event.start
        stack.append(event)
    for event in events:
        event.self_us = max(0.0, event.self_us)


def _name_components(events: list[HostEvent], call: HostEvent) -> None:
    """Name the component of each event: that of the label around it; on other threads, that of the same moment."""
    spans = sorted(
        (event.start, event.end, event.name.removeprefix(COMPONENT_LABEL))
        for event in events
        if event.kind == "label" and event.name.startswith(COMPONENT_LABEL)
    )
    index, last_thread = 0, None
    for event in sorted(events, key=lambda event: (str(event.thread), event.start)):
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
        if event.name.startswith(COMPONENT_LABEL)
    )
