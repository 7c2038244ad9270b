"""Find out from a trace which attention kernels really ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from vivace.measure.raw_trace import RawHostEvent, host_events

_DISPATCHER = (
    "aten::scaled_dot_product_attention"  # the public function, which encloses the kernel that it picks
)
_MARKS = ("scaled_dot_product", "vivace::")  # PyTorch's kernels; kernels that techniques redirect calls to
_RANGE = "vivace component "


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
