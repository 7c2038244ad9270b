"""Synchronisations are named with the line of Python that makes them."""

import torch

from tests.recorded_events import Results, event
from vivace.measure.profiling.profiler import PythonCall, Wait, host_waits, located, read_waits

_COPY = (
    '"device": 0, "context": 1, "stream": 7, "correlation": 1, "bytes": {}, "memory bandwidth (GB/s)": 1.5'
)


def call(start: int, end: int, file: str, line: int, *, is_exact: bool = True) -> PythonCall:
    return PythonCall(start, end, file, line, f"function_{line}", is_exact)


def test_the_innermost_caller_outside_torch_is_named() -> None:
    calls = [
        call(0, 100, "run.py", 1),
        call(10, 50, "diffusers/scheduler.py", 20, is_exact=False),
        call(20, 30, "diffusers/scheduler.py", 25),
        call(21, 29, "torch/_tensor.py", 900),
        call(40, 45, "other.py", 7),
    ]
    waits = [
        Wait("synchronisation", "cudaStreamSynchronize", "denoiser", 22, 28),
        Wait("synchronisation", "cudaStreamSynchronize", "denoiser", 32, 34),
        Wait("copy", "Memcpy DtoH (Device -> Pageable)", "other", 60, 90, num_bytes=64),
    ]
    rows = {(wait.file, wait.line): wait for wait in located(waits, calls)}
    assert rows["diffusers/scheduler.py", 25].is_exact
    assert not rows["diffusers/scheduler.py", 20].is_exact, "no call was traced: somewhere in the function"
    assert rows["run.py", 1].num_bytes == 64
    assert [wait.seconds for wait in located(waits, calls)] == [30e-9, 6e-9, 2e-9]


def test_waits_on_a_gpu_are_cuda_calls_and_copies_to_the_host() -> None:
    events = [
        event("vivace call", 0, 100),
        event("vivace component denoiser", 5, 30),
        event("vivace component denoiser", 0, 99, is_gpu=True),
        event("aten::_local_scalar_dense", 8, 12),
        event("cudaMemcpyAsync", 10, 2, correlation=1),
        event("cudaStreamSynchronize", 13, 5, correlation=2),
        event("cudaMemcpyAsync", 50, 20, correlation=3),
        event("cudaMemcpyAsync", 80, 1, correlation=4),
        event("cudaLaunchKernel", 90, 1, correlation=5),
        event("cudaDeviceSynchronize", 150, 9, correlation=6),
        event("Memcpy DtoH (Device -> Pinned)", 11, 1, is_gpu=True, correlation=1, metadata=_COPY.format(2)),
        event("Memcpy DtoH (Device -> Pageable)", 60, 1, is_gpu=True, correlation=3, metadata=_COPY.format(4096)),
        event("Memcpy HtoD (Pageable -> Device)", 81, 1, is_gpu=True, correlation=4, metadata=_COPY.format(8)),
    ]  # fmt: skip
    listed = [(wait.kind, wait.component, wait.start, wait.num_bytes) for wait in read_waits(Results(events))]
    assert listed == [
        ("copy", "denoiser", 10, 2),
        ("synchronisation", "denoiser", 13, 0),
        ("copy", "other", 50, 4096),
    ]


class _Pipe:
    """A pipeline with one component that reads a value in every call."""

    def __init__(self) -> None:
        self.unet = torch.nn.Identity()

    def __call__(self) -> None:
        for _ in range(3):
            self.unet(torch.ones(2)).sum().item()  # the line that the test looks for


def test_a_real_call_names_its_line() -> None:
    pipe = _Pipe()
    (row,) = host_waits(pipe, pipe)
    with open(__file__) as lines:
        line_number = next(k for k, line in enumerate(lines, 1) if "# the line that the test" in line)
    assert (row.kind, row.line, row.function, row.is_exact, row.count) == (
        "read",
        line_number,
        "__call__",
        True,
        3,
    )
    assert row.file.endswith("test_host_waits.py")
    assert not pipe.unet._forward_pre_hooks, "nothing stays attached"
