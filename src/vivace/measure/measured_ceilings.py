"""Measure the ceilings of a device: matmuls and attention by precision, and copies. The shapes are those of FLUX, SDXL
and SD 1.5; the fastest one is the ceiling. They are kept in the cache folder."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from vivace.errors import OutputError
from vivace.foundation.spec.ceilings import Ceiling, Ceilings, CeilingsIdentity, Operation, identity_of
from vivace.foundation.spec.environment import Environment
from vivace.foundation.untrusted.destinations import replace
from vivace.foundation.untrusted.files import cache_folder, read_bytes

TIME_LIMIT_S = 60.0
_REPEATS, _REPEATS_IF_SLOW = 9, 3
_SLOW_S = 0.5
_LEAST_S = 0.01
"""Seconds of one timing; calls are repeated until they take as long."""
_MAX_CALLS = 1000
_MAX_BYTES = 1_000_000
_DTYPES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}

# (rows, inputs, outputs) of linear layers: FLUX's MLP and fused projections at 1024 px, SDXL's MLPs with guidance.
_GEMMS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "cuda": (
        (4608, 3072, 12288),
        (4608, 12288, 3072),
        (4608, 3072, 21504),
        (8192, 640, 5120),
        (2048, 1280, 10240),
    ),
    "cpu": ((1024, 768, 3072), (256, 768, 3072)),
}
# (rows, heads, tokens, channels): FLUX; SDXL and SD 1.5 with guidance.
_ATTENTION: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "cuda": ((1, 24, 4608, 128), (2, 10, 4096, 64), (2, 8, 4096, 40)),
    "cpu": ((2, 8, 1024, 40), (1, 12, 576, 64)),
}
_COPIED_BYTES = {"cuda": 2**30, "cpu": 2**27}
MEASURED = tuple(_COPIED_BYTES)
"""The devices whose ceilings can be measured."""
_BY_DEVICE: dict[str, dict[str, tuple[str, ...]]] = {
    "cuda": {
        "gemm": ("fp32", "tf32", "bf16", "fp16", "fp8", "int8"),
        "attention": ("fp32", "tf32", "bf16", "fp16"),
    },
    "cpu": {"gemm": ("fp32", "bf16"), "attention": ("fp32", "bf16")},
}


class _NotHere(Exception):
    """This device or PyTorch cannot compute a case; the message says why."""


@dataclass(frozen=True)
class _Case:
    """One operation to time: `make` returns a function that performs it once on the device."""

    operation: Operation
    precision: str
    text: str
    amount: float
    make: Callable[[], Callable[[], Any]]

    @property
    def name(self) -> str:
        return f"{self.operation} {self.precision}".strip()


def measure_ceilings(
    environment: Environment,
    time_limit_s: float = TIME_LIMIT_S,
    report: Callable[[str], None] = lambda name: None,
) -> Ceilings:
    """Measure the ceilings of this process's device and return them."""
    import torch

    start = time.monotonic()
    ceilings: list[Ceiling] = []
    reasons: dict[str, str] = {}
    for case in _cases(environment.device):
        if time.monotonic() - start > time_limit_s:
            reasons.setdefault(case.name, f"the time limit of {time_limit_s:g} s passed before it")
            continue
        report(case.name)
        try:
            with torch.inference_mode(), _tf32(case.precision == "tf32"):
                seconds = _median_s(case.make(), environment.device)
        except (_NotHere, RuntimeError, NotImplementedError) as error:  # out of memory is a RuntimeError
            reasons.setdefault(case.name, (str(error).strip() or type(error).__name__).splitlines()[0])
            continue
        ceilings.append(
            Ceiling(
                operation=case.operation,
                precision=case.precision,
                case=case.text,
                per_s=case.amount / seconds,
            )
        )
    measured = {c.name for c in ceilings}
    identity = identity_of(environment)
    return Ceilings(
        **identity.model_dump(),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - start, 1),
        ceilings=tuple(ceilings),
        missing={name: why for name, why in reasons.items() if name not in measured},
    )


def known_ceilings(environment: Environment) -> Ceilings | None:
    """Return the ceilings that were measured on this device, driver and PyTorch; None if there are none."""
    identity = identity_of(environment)
    try:
        text = read_bytes(_file(identity), _MAX_BYTES)
        ceilings = Ceilings.model_validate_json(text)
    except (OSError, ValueError):  # no file yet, or one of another version
        return None
    return ceilings if ceilings.identity == identity else None


def keep(ceilings: Ceilings) -> Path:
    """Write ceilings into the cache folder and return their file. Earlier ones of the same device are replaced."""
    file = _file(ceilings.identity)
    try:
        replace(file, ceilings.model_dump_json(indent=1).encode())
    except OutputError as error:
        raise OutputError(
            f"the measured limits are lost: {error}; set VIVACE_CACHE to a folder that can be written"
        ) from error
    return file


def _file(identity: CeilingsIdentity) -> Path:
    return cache_folder() / "ceilings" / f"{identity.digest()[:32]}.json"


def _cases(device: str) -> Iterator[_Case]:
    """Yield the cases to time. Copies come first, since every limit needs them."""
    size = _COPIED_BYTES[device]
    yield _Case("copy", "", f"{size >> 20} MiB", 2 * size, lambda: _copy(device, size))
    if device == "cuda":
        yield _Case("host_to_device", "", f"{size >> 20} MiB from pinned memory", size, lambda: _onload(size))
    for shape, precision in itertools.product(_GEMMS[device], _BY_DEVICE[device]["gemm"]):
        text = " x ".join(map(str, shape))
        yield _Case(
            "gemm", precision, text, 2.0 * math.prod(shape), partial(_gemm, device, precision, *shape)
        )
    kernels = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
    every = itertools.product(
        _ATTENTION[device], _BY_DEVICE[device]["attention"], kernels if device == "cuda" else kernels[:1]
    )
    for heads, precision, kernel in every:
        rows, number, tokens, channels = heads
        yield _Case(
            "attention",
            precision,
            f"{rows} x {number} x {tokens} x {channels}, {kernel.lower().removesuffix('_attention')}",
            4.0 * rows * number * tokens * tokens * channels,
            partial(_attention, device, precision, heads, kernel),
        )


def _copy(device: str, size: int) -> Callable[[], Any]:
    import torch

    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _onload(size: int) -> Callable[[], Any]:
    import torch

    source = torch.ones(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    return lambda: target.copy_(source, non_blocking=True)


def _gemm(device: str, precision: str, rows: int, inputs: int, outputs: int) -> Callable[[], Any]:
    """Return a call of rows x inputs times inputs x outputs, with the weight stored as in a Linear."""
    import torch

    if precision == "int8":
        a8 = torch.randint(-8, 8, (rows, inputs), dtype=torch.int8, device=device)
        b8 = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8, device=device)
        return lambda: torch._int_mm(a8, b8.t())
    if precision == "fp8":
        if torch.cuda.get_device_capability() < (8, 9):
            raise _NotHere("matmuls in fp8 need compute capability 8.9")
        a = torch.randn(rows, inputs, device=device).to(torch.float8_e4m3fn)
        b = torch.randn(outputs, inputs, device=device).to(torch.float8_e4m3fn)
        scales = (torch.ones(rows, 1, device=device), torch.ones(1, outputs, device=device))
        return lambda: torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)
    if precision == "tf32" and torch.cuda.get_device_capability() < (8, 0):
        raise _NotHere("TF32 needs compute capability 8.0")
    dtype = getattr(torch, _DTYPES[precision])
    left = torch.randn(rows, inputs, device=device, dtype=dtype)
    right = torch.randn(outputs, inputs, device=device, dtype=dtype)
    return lambda: torch.nn.functional.linear(left, right)


def _attention(
    device: str, precision: str, shape: tuple[int, int, int, int], kernel: str
) -> Callable[[], Any]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dtype = getattr(torch, _DTYPES[precision])
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    backend = getattr(SDPBackend, kernel)

    def attend() -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return attend


def _median_s(call: Callable[[], Any], device: str) -> float:
    """Return the median seconds of one call; the first calls, which load kernels and raise the clocks, are left out."""
    call()
    once = _timed_s(call, 1, device)
    calls = min(_MAX_CALLS, max(1, round(_LEAST_S / max(once, 1e-7))))
    _timed_s(call, calls, device)
    repeats = _REPEATS if once < _SLOW_S else _REPEATS_IF_SLOW
    return statistics.median(_timed_s(call, calls, device) for _ in range(repeats))


def _timed_s(call: Callable[[], Any], calls: int, device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / calls


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    import torch

    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32 = before
