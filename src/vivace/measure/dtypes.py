"""Measure how fast this machine computes in each dtype, on the layers of a small denoiser."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from vivace.foundation.untrusted.files import is_out_of_memory, reason
from vivace.measure.accelerator import synchronise

_REPEATS = 7
_SLOW = 1.3  # a dtype that takes more than this many times fp32's time counts as slow


def probe_dtypes(device: str) -> dict[str, float | str]:
    """Return the median milliseconds of one convolution, linear layer and attention in fp32, bf16 and fp16.

    Where the device does not compute in a dtype it is the reason, in words.

    A CPU without hardware support for a dtype emulates it, 10 to 30 times slower or more; only a measurement shows it.
    """
    import torch

    threads = torch.get_num_threads()
    # Two threads on a busy two-core machine can take 40 times as long as one, which would hide the dtypes' difference.
    torch.set_num_threads(1)
    try:
        return {name: _probe_or_reason(device, dtype) for name, dtype in _dtypes().items()}
    finally:
        torch.set_num_threads(threads)


def _dtypes() -> dict[str, Any]:
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _probe_or_reason(device: str, dtype: Any) -> float | str:
    try:
        return _probe(device, dtype)
    # AssertionError: PyTorch built without that device. TypeError: a dtype that it does not have there.
    except (RuntimeError, AssertionError, TypeError) as error:
        if is_out_of_memory(error):
            raise
        return reason(error)


def _probe(device: str, dtype: Any) -> float:
    """Return the median milliseconds of a few runs."""
    import torch

    conv = torch.nn.Conv2d(64, 64, 3, padding=1).to(device, dtype)
    linear = torch.nn.Linear(256, 256).to(device, dtype)
    image = torch.randn(2, 64, 32, 32).to(device, dtype)
    tokens = torch.randn(2, 256, 256).to(device, dtype)
    heads = torch.randn(2, 8, 256, 32).to(device, dtype)

    def work() -> None:
        conv(image)
        linear(tokens)
        torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)

    with torch.inference_mode():
        work()
        return statistics.median(_time(work, device) for _ in range(_REPEATS)) * 1000


def slow_dtypes(probed: Mapping[str, float | str]) -> dict[str, float]:
    """Return the dtypes that are clearly slower than fp32, with the factor."""
    times_ms = {name: ms for name, ms in probed.items() if not isinstance(ms, str)}
    if "fp32" not in times_ms:
        return {}
    base = times_ms["fp32"]
    return {name: ms / base for name, ms in times_ms.items() if ms > _SLOW * base}


def _time(work: Callable[[], None], device: str) -> float:
    synchronise(device)
    start = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - start
