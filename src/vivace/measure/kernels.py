"""Which attention kernels really ran: read from a trace, not from what was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MARK = "scaled_dot_product"
_RANGE = "vivace.denoiser"


def attention_kernels(denoiser: Any, call: Callable[[], Any]) -> list[str]:
    """Trace `call` (one short pipeline call) and name the attention operators that ran.

    Returns "denoiser: NAME xCOUNT" for those inside the denoiser's forward, "elsewhere: ..." for the others
    (text encoders, VAE). Compiled graphs may have dissolved the operators into their own kernels; then nothing is
    seen, and an empty list is returned for them.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    forward = denoiser.forward

    def ranged(*args: Any, **kwargs: Any) -> Any:
        with record_function(_RANGE):
            return forward(*args, **kwargs)

    denoiser.forward = ranged
    try:
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            call()
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.synchronize()
    finally:
        denoiser.forward = forward
    counts: dict[str, int] = {}
    for event in trace.events():
        if _MARK not in event.name or event.name.endswith("aten::scaled_dot_product_attention"):
            continue
        where = "elsewhere"
        parent = event.cpu_parent
        nested = False
        while parent is not None:
            if parent.name == _RANGE:
                where = "denoiser"
            elif _MARK in parent.name and not parent.name.endswith("aten::scaled_dot_product_attention"):
                nested = True  # a kernel's own helper
            parent = parent.cpu_parent
        if not nested:
            name = f"{where}: {event.name.removeprefix('aten::')}"
            counts[name] = counts.get(name, 0) + 1
    return [f"{name} x{count}" for name, count in sorted(counts.items())]
