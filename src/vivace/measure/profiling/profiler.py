"""Run a call under torch.profiler, with each component labelled."""

from __future__ import annotations

import gc
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vivace.foundation.spec.profiling import HostWait
from vivace.machinery.technique import COMPONENTS, component_of
from vivace.measure.profiling.trace import (
    CALL_LABEL,
    COMPONENT_LABEL,
    LABEL,
    OTHER_COMPONENT,
    DeviceEvent,
    HostEvent,
    MemoryEvent,
    Trace,
    covered,
    trace_of,
)

SYNCHRONISING = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
)
READS = ("aten::_local_scalar_dense",)
_LIBRARY = ("torch/", "contextlib.py", "functools.py", "<built-in")


@dataclass(frozen=True)
class PythonCall:
    """A call in Python while it was traced. Times in nanoseconds.

    Attributes:
        file, line, function: where the call is made; of a Python function also where it begins.
        is_exact: whether `line` is the line of the call; else it is the first line of `function`.
    """

    start: int
    end: int
    file: str
    line: int
    function: str
    is_exact: bool


@dataclass(frozen=True)
class Wait:
    """A CUDA call that waits, a copy to the host, or a value that is read. Times in nanoseconds."""

    kind: str
    what: str
    component: str
    start: int
    end: int
    num_bytes: int = 0


_MEMORY = "[memory]"
_INSTANTS = (_MEMORY, "[OutOfMemory]")
_CUDA_CALL = re.compile(r"cu(da)?[A-Z]\w*")
"""Prefixes of calls of the runtime and the driver. PyTorch 2.11 gives events no kind; operators have a namespace."""
_TO_HOST = "Memcpy DtoH"
_COPY = "cudaMemcpyAsync"
_SYNCHRONISING = (*SYNCHRONISING, "cudaMemcpy")
_LOOKED_AT = (CALL_LABEL, COMPONENT_LABEL, _TO_HOST, _COPY, *_SYNCHRONISING, *READS)
_BYTES = re.compile(r'"bytes": (\d+)')
_FUNCTION = re.compile(r"[\w<>.]+")
_DISPATCHER = (
    "aten::scaled_dot_product_attention"  # the public function, which encloses the kernel that it picks
)
_ATTENTION = (
    "scaled_dot_product",
    "vivace::",
)  # PyTorch's kernels; kernels that techniques redirect calls to


def traced(pipe: Any, call: Callable[[], Any], file: Path | None = None) -> Trace:
    """Run one call of the pipeline and return its events."""
    with _labelled(pipe), _profiler(profile_memory=True) as profiler:
        _run(call)
    if file is not None:
        profiler.export_chrome_trace(str(file))
    with uncollected():
        return read_results(profiler.profiler.kineto_results)


def host_waits(pipe: Any, call: Callable[[], Any]) -> list[HostWait]:
    """Run one call, in which Python's calls are traced too, and return the places at which the host waits. On a CPU,
    these are the places that read a tensor's value."""
    from torch._C._profiler import _ExperimentalConfig

    # Metadata tell the bytes of copies.
    config = _ExperimentalConfig(expose_kineto_event_metadata=True)
    with _labelled(pipe), _profiler(with_stack=True, experimental_config=config) as profiler:
        _run(call)
    results = profiler.profiler.kineto_results
    with uncollected():
        waits = read_waits(results)
        return located(waits, python_calls(results, [wait.start for wait in waits]))


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
    ranges = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in trace.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA
    ]
    return covered(ranges) / 1e9 if ranges else None


def attention_kernels(parts: Mapping[str, Any], call: Callable[[], Any]) -> list[str]:
    """Trace one short pipeline call; return the attention operators that ran by part, as "denoiser: NAME x20".

    Those outside of the parts (text encoders) are "elsewhere"; those that a compiled graph replaces are not listed.
    """
    from torch.profiler import ProfilerActivity, profile

    with ExitStack() as stack:
        for name, part in parts.items():
            stack.enter_context(_labelled_module(name, part))
        profiler = stack.enter_context(profile(activities=[ProfilerActivity.CPU]))
        _run(call)
    counts = Counter(
        (event.component.replace(OTHER_COMPONENT, "elsewhere"), re.sub("^(aten|vivace)::", "", event.name))
        for event in read_results(profiler.profiler.kineto_results).host
        # A kernel may call another.
        if _is_attention(event.name) and not any(_is_attention(around.name) for around in event.ancestors())
    )
    return [f"{where}: {name} x{count}" for (where, name), count in sorted(counts.items())]


def _is_attention(name: str) -> bool:
    return any(mark in name for mark in _ATTENTION) and not name.endswith(_DISPATCHER)


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection inside the context, where many lasting objects are made: scans take seconds."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _profiler(**options: Any) -> Any:
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, **options)


def _run(call: Callable[[], Any]) -> None:
    import torch
    from torch.profiler import record_function

    with record_function(CALL_LABEL):
        call()
    # Outside of the label, so that this wait is not one of the call's.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextmanager
def _labelled(pipe: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for component in COMPONENTS:
            module = component_of(pipe, component)
            if module is None:
                continue
            if component == "vae":
                stack.enter_context(_labelled_decode(module))
            else:
                stack.enter_context(_labelled_module(component, module))
        yield


@contextmanager
def _labelled_module(component: str, module: Any) -> Iterator[None]:
    from torch.profiler import record_function

    open_labels: list[Any] = []

    def begin(*_: Any) -> None:
        label = record_function(COMPONENT_LABEL + component)
        label.__enter__()
        open_labels.append(label)

    def end(*_: Any) -> None:
        open_labels.pop().__exit__(None, None, None)

    hooks = [
        module.register_forward_pre_hook(begin, prepend=True),
        module.register_forward_hook(end, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _labelled_decode(vae: Any) -> Iterator[None]:
    from torch.profiler import record_function

    decode = vae.decode

    def labelled(*args: Any, **kwargs: Any) -> Any:
        with record_function(COMPONENT_LABEL + "vae"):
            return decode(*args, **kwargs)

    vae.decode = labelled
    try:
        yield
    finally:
        vae.decode = decode


# What is known of an event differs by its list. `events()` tells the thread as the operating system numbers it, and has
# the GPU's events that nothing launched; the event tree alone tells the addresses of allocations.
def read_results(results: Any) -> Trace:
    """Return the profiled call from `kineto_results` of a torch.profiler.profile that has ended."""
    from torch.autograd import DeviceType

    gpu = DeviceType.CUDA  # what ROCm's are called too
    zero = results.trace_start_ns()  # of the epoch's nanoseconds, a float would lose some
    host: list[HostEvent] = []
    device: list[DeviceEvent] = []
    has_memory = False
    for event in results.events():
        name = event.name()
        if name in _INSTANTS:
            has_memory = True
            continue
        began = event.start_ns() - zero
        start, end = began / 1000, (began + event.duration_ns()) / 1000
        if event.device_type() == gpu:
            if not event.is_user_annotation():
                device.append(DeviceEvent(name, start, end, event.correlation_id()))
        elif event.device_index() >= 0:  # else it is the profiler's own work
            kind = _kind(name)
            if kind == "cuda" and event.is_user_annotation():
                kind = "operator"
            correlation = event.correlation_id() if kind == "cuda" else None
            host.append(HostEvent(name, kind, start, end, event.device_resource_id(), correlation))
    return trace_of(host, device, _allocations(results, zero) if has_memory else ())


@cache
def _kind(name: str) -> str:
    if name.startswith(LABEL):
        return "label"
    return "cuda" if _CUDA_CALL.fullmatch(name) else "operator"


def _allocations(results: Any, zero: int) -> Iterator[MemoryEvent]:
    left = list(results.experimental_event_tree())
    while left:
        event = left.pop()
        if children := event.children:
            left += children
        elif event.name == _MEMORY:
            fields = event.extra_fields
            at = (event.start_time_ns - zero) / 1000
            is_cuda = fields.device.type == "cuda"
            yield MemoryEvent(at, fields.alloc_size, fields.ptr or 0, fields.total_allocated, is_cuda)


def read_waits(results: Any) -> list[Wait]:
    """Return the events that made the host wait, or would on a GPU, inside the call."""
    from torch.autograd import DeviceType

    events = results.events()
    host: list[tuple[str, Any]] = []
    copies: dict[int, tuple[str, int]] = {}
    for name, event in _looked_at(events):
        if event.device_type() == DeviceType.CPU:
            host.append((name, event))
        elif name.startswith(_TO_HOST):
            match = _BYTES.search(event.metadata_json())
            copies[event.correlation_id()] = name, int(match[1]) if match else 0
    call = next(event for name, event in host if name == CALL_LABEL)
    first, last = call.start_ns(), call.start_ns() + call.duration_ns()
    spans = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), name.removeprefix(COMPONENT_LABEL))
        for name, event in host
        if name.startswith(COMPONENT_LABEL)
    ]
    reads_wait = any(name in READS for name, _ in host) and all(
        event.device_type() == DeviceType.CPU for event in events
    )
    waits = []
    for name, event in host:
        start = event.start_ns()
        if not first <= start <= last:
            continue
        kind, what, num_bytes = "", name, 0
        if name in _SYNCHRONISING:
            kind = "synchronisation"
        elif name.startswith(_COPY) and event.correlation_id() in copies:
            kind = "copy"
            what, num_bytes = copies[event.correlation_id()]
        elif name in READS and reads_wait:
            kind = "read"
        if kind:
            component = next((who for begin, end, who in spans if begin <= start < end), OTHER_COMPONENT)
            waits.append(Wait(kind, what, component, start, start + event.duration_ns(), num_bytes))
    return waits


def _looked_at(events: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the events that may be waits, with their names; some names cannot be read (see `_place`)."""
    for event in events:
        try:
            name = event.name()
        except UnicodeDecodeError:
            continue
        if name.startswith(_LOOKED_AT):
            yield name, event


def python_calls(results: Any, times: Iterable[int]) -> list[PythonCall]:
    """Return the Python calls around some moments (nanoseconds), callers before callees. Of the event tree, which has
    an event for each function that was called, only the branches around them are read."""
    ordered = sorted(times)

    def is_around(event: Any) -> bool:
        start, end = event.start_time_ns, event.end_time_ns
        index = bisect_left(ordered, start)
        # What has not ended has an end before its start.
        return index < len(ordered) and (ordered[index] <= end or end < start)

    calls = []
    left = [event for event in results.experimental_event_tree() if is_around(event)][::-1]
    while left:
        event = left.pop()
        fields = event.extra_fields
        for name, is_exact in (("caller", True), ("callsite", False)):
            place = _place(getattr(fields, name, None))
            if place is not None:
                calls.append(PythonCall(event.start_time_ns, event.end_time_ns, *place, is_exact))
        left += [event for event in event.children if is_around(event)][::-1]
    return calls


def _place(state: Any) -> tuple[str, int, str] | None:
    """Return file, line and function of a frame; None if there is none. The names of some frames are freed before
    PyTorch hands them out (2.13), and read as arbitrary bytes."""
    if state is None:
        return None
    try:
        file, line, function = state.file_name, state.line_number, state.function_name
    except UnicodeDecodeError:
        return None
    is_sound = file.endswith(".py") and file.isprintable() and _FUNCTION.fullmatch(function)
    return (file, line, function) if is_sound else None


def located(waits: Iterable[Wait], calls: Sequence[PythonCall]) -> list[HostWait]:
    """Return the waits by place, the longest first.

    Args:
        calls: of the thread that waits; those around a wait are its callers. Lines in PyTorch itself are passed over
            for the line that called it.
    """
    groups: dict[tuple[str, str, str, str, int, str, bool], list[Wait]] = defaultdict(list)
    ordered = sorted(calls, key=lambda call: (call.start, -call.end))
    stack: list[PythonCall] = []
    index = 0
    for wait in sorted(waits, key=lambda wait: wait.start):
        while index < len(ordered) and ordered[index].start <= wait.start:
            while stack and stack[-1].end < ordered[index].start:
                stack.pop()
            stack.append(ordered[index])
            index += 1
        around = [call for call in stack if call.end >= wait.start][::-1]
        place = next((call for call in around if not call.file.startswith(_LIBRARY)), None)
        place = place or next(iter(around), PythonCall(0, 0, "?", 0, "?", False))
        key = (wait.kind, wait.what, wait.component, place.file, place.line, place.function, place.is_exact)
        groups[key].append(wait)
    rows = [
        HostWait(
            kind=kind,
            what=what,
            component=component,
            file=file,
            line=line,
            function=function,
            is_exact=is_exact,
            count=len(waits_),
            seconds=sum(wait.end - wait.start for wait in waits_) / 1e9,
            num_bytes=sum(wait.num_bytes for wait in waits_),
        )
        for (kind, what, component, file, line, function, is_exact), waits_ in groups.items()
    ]
    return sorted(rows, key=lambda row: (-row.seconds, row.file, row.line))
