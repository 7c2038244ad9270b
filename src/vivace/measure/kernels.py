"""Which attention kernels really ran: read from a trace, not from what was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

_WHOLE = "aten::scaled_dot_product_attention"  # what callers call, around the kernel that it picks
_MARKS = ("scaled_dot_product", "vivace::")  # PyTorch's own kernels; those that techniques lead calls to
_RANGE = "vivace component "


def attention_kernels(parts: Mapping[str, Any], call: Callable[[], Any]) -> list[str]:
    """Trace `call` (one short pipeline call) and name the attention operators that ran.

    Args:
        parts: modules by name, e.g. {"denoiser": pipe.unet, "vae": pipe.vae.decoder}.

    Returns "denoiser: NAME xCOUNT" for those inside a part's forward, "elsewhere: ..." for the others (text
    encoders). Compiled graphs may have dissolved the operators into their own kernels; then nothing is seen, and an
    empty list is returned for them.
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
    for event in trace.events():
        if not _is_kernel(event.name):
            continue
        where = "elsewhere"
        parent = event.cpu_parent
        nested = False
        while parent is not None:
            if parent.name.startswith(_RANGE):
                where = parent.name.removeprefix(_RANGE)
            elif _is_kernel(parent.name):
                nested = True  # a kernel's own helper
            parent = parent.cpu_parent
        if not nested:
            name = f"{where}: {event.name.removeprefix('aten::').removeprefix('vivace::')}"
            counts[name] = counts.get(name, 0) + 1
    return [f"{name} x{count}" for name, count in sorted(counts.items())]


def _is_kernel(name: str) -> bool:
    return any(mark in name for mark in _MARKS) and not name.endswith(_WHOLE)


@contextmanager
def _ranged(name: str, part: Any) -> Iterator[None]:
    """Name the part's forward in traces, for as long as the context lasts."""
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
