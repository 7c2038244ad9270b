"""Run a call under torch.profiler, with each component labelled."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from vivace.contract import COMPONENTS, component_of
from vivace.profiling.host_waits import READS, SYNCHRONISING, PythonCall, Wait, located
from vivace.profiling.trace import CALL_LABEL, COMPONENT_LABEL, OTHER_COMPONENT, Trace, read_trace
from vivace.spec.profiling import HostWait

_TO_HOST = "Memcpy DtoH"
_FUNCTION = re.compile(r"[\w<>.]+")


def traced(pipe: Any, call: Callable[[], Any], file: Path) -> Trace:
    """Run one call of the pipeline, write its Chrome trace and return it.

    Args:
        file: of the trace; compressed if its name ends in .gz.
    """
    import gzip

    with _labelled(pipe), _profiler(profile_memory=True) as found:
        _run(call)
    found.export_chrome_trace(str(file))
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
        return read_trace(json.load(lines)["traceEvents"])


def host_waits(pipe: Any, call: Callable[[], Any]) -> list[HostWait]:
    """Run one call, in which Python's calls are traced too, and return the places at which the host waits.

    On a CPU, these are the places that read a tensor's value.
    """
    with _labelled(pipe), _profiler(with_stack=True) as found:
        _run(call)
    results = found.profiler.kineto_results
    calls: list[PythonCall] = []
    for root in results.experimental_event_tree():
        calls += _python_calls(root)
    events = [(_name(event), event) for event in results.events()]
    has_copies = any(name.startswith(_TO_HOST) for name, _ in events)
    return located(_waits(events, _copied_bytes(found) if has_copies else {}), calls)


def _copied_bytes(found: Any) -> dict[int, int]:
    """Return the bytes of each copy by its correlation: only the written trace tells them (PyTorch 2.11)."""
    with tempfile.TemporaryDirectory(prefix="vivace-") as folder:
        file = Path(folder) / "trace.json"
        found.export_chrome_trace(str(file))
        with file.open(errors="replace") as lines:
            events = json.load(lines, strict=False)["traceEvents"]
    copies = (event["args"] for event in events if event.get("cat") == "gpu_memcpy")
    return {int(args["correlation"]): int(args.get("bytes", 0)) for args in copies}


def _profiler(**options: bool) -> Any:
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
    """Label the components' calls in traces inside the context."""
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
    """Label the module's calls, including its other hooks, in which step caches work."""
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


def _python_calls(node: Any) -> Iterator[PythonCall]:
    """Yield the Python calls of an event tree, callers before what they call."""
    left = [node]
    while left:
        one = left.pop()
        fields = one.extra_fields
        for name, is_exact in (("caller", True), ("callsite", False)):
            place = _place(getattr(fields, name, None))
            if place is not None:
                yield PythonCall(one.start_time_ns, one.end_time_ns, *place, is_exact)
        left += one.children[::-1]


def _place(state: Any) -> tuple[str, int, str] | None:
    """Return file, line and function of a frame; None if there is none.

    The names of some frames are freed before PyTorch hands them out (2.13), and read as arbitrary bytes.
    """
    if state is None:
        return None
    try:
        file, line, function = state.file_name, state.line_number, state.function_name
    except UnicodeDecodeError:
        return None
    is_sound = file.endswith(".py") and file.isprintable() and _FUNCTION.fullmatch(function)
    return (file, line, function) if is_sound else None


def _name(event: Any) -> str:
    """Return the name of an event; empty if it cannot be read (see `_place`)."""
    try:
        return str(event.name())
    except UnicodeDecodeError:
        return ""


def _waits(events: Sequence[tuple[str, Any]], copied: Mapping[int, int]) -> Iterator[Wait]:
    """Yield what made the host wait, or would on a GPU, inside the call.

    Args:
        events: with their names.
        copied: bytes of copies by correlation.
    """
    call = next(event for name, event in events if name == CALL_LABEL)
    first, last = call.start_ns(), call.start_ns() + call.duration_ns()
    spans = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), name.removeprefix(COMPONENT_LABEL))
        for name, event in events
        if name.startswith(COMPONENT_LABEL) and "CPU" in str(event.device_type())
    ]
    copies = {event.correlation_id(): name for name, event in events if name.startswith(_TO_HOST)}
    has_gpu = any("CUDA" in str(event.device_type()) for _, event in events)
    for name, event in events:
        start = event.start_ns()
        if not first <= start <= last or "CPU" not in str(event.device_type()):
            continue
        kind, what, num_bytes = "", name, 0
        if name in SYNCHRONISING or name == "cudaMemcpy":
            kind = "synchronisation"
        elif name.startswith("cudaMemcpyAsync") and event.correlation_id() in copies:
            correlation = event.correlation_id()
            kind, what, num_bytes = "copy", copies[correlation], copied.get(correlation, 0)
        elif name in READS and not has_gpu:
            kind = "read"
        if kind:
            component = next((who for begin, end, who in spans if begin <= start < end), OTHER_COMPONENT)
            yield Wait(kind, what, component, start, start + event.duration_ns(), num_bytes)
