"""Run a call under torch.profiler, with each component labelled."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from vivace.foundation.spec.profiling import HostWait
from vivace.machinery.technique import COMPONENTS, component_of
from vivace.measure.profiling.host_waits import located
from vivace.measure.profiling.torch_events import python_calls, read_results, read_waits
from vivace.measure.profiling.trace import CALL_LABEL, COMPONENT_LABEL, Trace


def traced(pipe: Any, call: Callable[[], Any], file: Path | None = None) -> Trace:
    """Run one call of the pipeline and return its events.

    Args:
        file: for its Chrome trace; None to write none.
    """
    with _labelled(pipe), _profiler(profile_memory=True) as profiler:
        _run(call)
    if file is not None:
        profiler.export_chrome_trace(str(file))
    with uncollected():
        return read_results(profiler.profiler.kineto_results)


def host_waits(pipe: Any, call: Callable[[], Any]) -> list[HostWait]:
    """Run one call, in which Python's calls are traced too, and return the places at which the host waits.

    On a CPU, these are the places that read a tensor's value.
    """
    from torch._C._profiler import _ExperimentalConfig

    # Metadata tell the bytes of copies.
    config = _ExperimentalConfig(expose_kineto_event_metadata=True)
    with _labelled(pipe), _profiler(with_stack=True, experimental_config=config) as profiler:
        _run(call)
    results = profiler.profiler.kineto_results
    with uncollected():
        waits = read_waits(results)
        return located(waits, python_calls(results, [wait.start for wait in waits]))


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
