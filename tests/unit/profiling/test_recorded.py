"""What is read from torch.profiler's own objects is what the trace says that it writes."""

import json
import threading
from pathlib import Path

import torch
from torch.profiler import record_function

from tests.chrome_trace import assert_alike, read_chrome_trace
from tests.recorded_events import results_of
from tests.unit.profiling.test_breakdown import EVENTS, host, kernel, launch, memory
from vivace.measure.profiling import breakdown
from vivace.measure.profiling.profiler import read_results, traced

ON_A_GPU = [
    *EVENTS,
    launch(86, 4, "cuLaunchKernelEx", 1),
    launch(30, 5, "cudaMemcpyAsync", 1) | {"tid": 2},
    host("aten::another_thread", 29, 4) | {"tid": 2},
    host("Torch-Compiled Region: 0/0", 88, 3, "user_annotation"),
    host("cudaGraph of mine", 92, 2, "cpu_op"),
    host("cudaUser", 94, 1, "user_annotation"),
    host("Activity Buffer Request", 40, 3, "overhead"),
    kernel("triton_poi_fused_add_3", 95, 12, 4),
    kernel("Memcpy DtoH (Device -> Pinned)", 96, 1, 5, "gpu_memcpy"),
    kernel("Memset (Device)", 97, 1.5, 77, "gpu_memset"),
    memory(45, 64, 0xC, 0, 0),
]  # fmt: skip


def test_a_profile_of_a_gpu_reads_as_its_trace() -> None:
    trace, recorded = read_chrome_trace(ON_A_GPU), read_results(results_of(ON_A_GPU))
    assert_alike(recorded, trace)
    assert breakdown.memory(recorded) is not None
    assert {event.name for event in recorded.device} >= {"Memset (Device)", "triton_poi_fused_add_3"}
    assert not any(event.name in ("vivace call", "Activity Buffer Request") for event in recorded.device)
    assert not any(event.name == "Activity Buffer Request" for event in recorded.host)


class _Pipe:
    """Parts inside of parts, two threads, allocations that outlive the call and some from before it."""

    def __init__(self) -> None:
        self.unet = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8)))
        self.kept: list[torch.Tensor] = [torch.ones(1000)]

    def __call__(self) -> None:
        self.kept.pop()
        for step in range(20):
            out = self.unet(torch.randn(4, 16))
            with record_function("a label of a user"):
                out = torch.nn.functional.scaled_dot_product_attention(*[out.view(1, 1, 4, 16)] * 3)
            self.kept.append(out.softmax(-1) + step)
        other = threading.Thread(target=lambda: torch.ones(3).sum().item())
        other.start()
        other.join()


def test_a_profile_of_a_cpu_reads_as_its_trace(tmp_path: Path) -> None:
    pipe = _Pipe()
    recorded = traced(pipe, pipe, tmp_path / "t.json")
    expected = read_chrome_trace(json.loads((tmp_path / "t.json").read_text())["traceEvents"])
    assert len(recorded.host) == len(expected.host) > 500
    assert len(recorded.memory) == len(expected.memory) > 100
    assert_alike(recorded, expected)
