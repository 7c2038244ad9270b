"""Synchronisations are named with the line of Python that makes them."""

import torch

from vivace.profiling.host_waits import PythonCall, Wait, located
from vivace.profiling.profiler import host_waits


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
    rows = {(one.file, one.line): one for one in located(waits, calls)}
    assert rows["diffusers/scheduler.py", 25].is_exact
    assert not rows["diffusers/scheduler.py", 20].is_exact, "no call was traced: somewhere in the function"
    assert rows["run.py", 1].num_bytes == 64
    assert [one.seconds for one in located(waits, calls)] == [30e-9, 6e-9, 2e-9]


def test_a_wait_without_a_caller_is_kept() -> None:
    (row,) = located([Wait("synchronisation", "cudaDeviceSynchronize", "other", 5, 9)], [])
    assert (row.file, row.count) == ("?", 1)


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
        wanted = next(k for k, line in enumerate(lines, 1) if "# the line that the test" in line)
    assert (row.kind, row.line, row.function, row.is_exact, row.count) == (
        "read",
        wanted,
        "__call__",
        True,
        3,
    )
    assert row.file.endswith("test_host_waits.py")
    assert not pipe.unet._forward_pre_hooks, "nothing stays attached"
