"""Traces of known content, as torch.profiler writes them: nothing counts twice, and gaps and memory are told."""

from typing import Any

import pytest

from tests.chrome_trace import read_chrome_trace
from vivace.measure.profiling import breakdown
from vivace.measure.profiling.breakdown import family_of
from vivace.measure.profiling.trace import Trace

CUDA = 1


def host(name: str, start: float, length: float, category: str = "cpu_op", **args: Any) -> dict[str, Any]:
    return {
        "ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": length, "args": args
    }  # fmt: skip


def launch(
    start: float, correlation: int, name: str = "cudaLaunchKernel", length: float = 2
) -> dict[str, Any]:
    return host(name, start, length, "cuda_runtime", correlation=correlation)


def kernel(
    name: str, start: float, length: float, correlation: int, category: str = "kernel"
) -> dict[str, Any]:
    event = host(name, start, length, category, correlation=correlation, device=0, stream=7)
    return event | {"pid": 0, "tid": 7}


def memory(at: float, num_bytes: int, address: int, total: int, device_type: int = CUDA) -> dict[str, Any]:
    args = {"Bytes": num_bytes, "Addr": address, "Total Allocated": total, "Device Type": device_type}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": at, "tid": 1, "args": args}


# A call of 100 µs: a convolution with its bias, a wait, and a kernel of a CUDA graph. The GPU's timeline has the labels
# too; they are what makes torch.profiler's own percentages exceed 100.
EVENTS = [
    host("vivace call", 0, 100, "user_annotation"),
    host("vivace component denoiser", 10, 50, "user_annotation"),
    host("aten::conv2d", 12, 20),
    host("aten::cudnn_convolution", 14, 8),
    launch(16, 1),
    host("aten::add_", 24, 6),
    launch(26, 2),
    host("aten::item", 62, 20),
    host("cudaStreamSynchronize", 64, 16, "cuda_runtime", correlation=9),
    launch(84, 3, "cudaGraphLaunch"),
    kernel("sm90_xmma_fprop_implicit_gemm", 20, 30, 1),
    kernel("vectorized_elementwise_kernel", 50, 10, 2),
    kernel("ampere_fp16_s16816gemm", 90, 15, 3),
    kernel("vivace call", 20, 85, 0, "gpu_user_annotation"),
    kernel("vivace component denoiser", 20, 40, 0, "gpu_user_annotation"),
    memory(15, 1000, 0xA, 6000),
    memory(25, 500, 0xB, 6500),
    memory(63, -1000, 0xA, 5500),
    memory(70, -700, 0xF, 4800),
    host("outside", 200, 5),
]


@pytest.fixture(scope="module")
def trace() -> Trace:
    return read_chrome_trace(EVENTS)


def test_each_kernel_counts_once(trace: Trace) -> None:
    rows = {row.name: row for row in breakdown.operators(trace)}
    assert sum(row.self_cuda_s for row in rows.values()) == pytest.approx(55e-6)
    assert rows["aten::cudnn_convolution"].self_cuda_s == pytest.approx(30e-6)
    assert rows["aten::conv2d"].self_cuda_s == 0
    assert rows["aten::conv2d"].cuda_s == pytest.approx(40e-6)
    assert rows["call"].cuda_s == pytest.approx(55e-6)
    assert rows["ampere_fp16_s16816gemm"].self_cuda_s == pytest.approx(15e-6), "no operator launched it"
    assert "vivace call" not in rows
    assert "outside" not in rows


def test_self_times_of_the_host_add_up_to_the_call(trace: Trace) -> None:
    rows = {row.name: row for row in breakdown.operators(trace)}
    assert sum(row.self_cpu_s for row in rows.values()) == pytest.approx(100e-6)
    assert max(row.cpu_s for row in rows.values()) == rows["call"].cpu_s == pytest.approx(100e-6)
    assert rows["aten::conv2d"].self_cpu_s == pytest.approx(6e-6)
    assert rows["call"].self_cpu_s == pytest.approx((100 - 20 - 20 - 2) * 1e-6), "labels are Python's time"
    assert rows["cudaLaunchKernel"].num_calls == 2


def test_families_follow_the_operator_and_copies_the_kernel(trace: Trace) -> None:
    by_name = {family.name: family for family in breakdown.families(trace)}
    assert by_name["convolution"].cuda_s == pytest.approx(40e-6), "its bias included"
    assert by_name["GEMM"].cuda_s == pytest.approx(15e-6)
    assert by_name["CUDA calls"].cpu_s == pytest.approx((2 + 2 + 16 + 2) * 1e-6)
    assert sum(family.cpu_s for family in by_name.values()) == pytest.approx(100e-6)


def test_gaps_are_the_host_being_late_only_where_it_did_not_wait(trace: Trace) -> None:
    assert breakdown.busy_us(trace) == pytest.approx(55)
    gaps = {(gap.component, gap.before): gap for gap in breakdown.gaps(trace)}
    first = gaps["denoiser", "aten::conv2d"]
    assert (first.idle_s, first.host_late_s) == (pytest.approx(20e-6), pytest.approx(16e-6))
    # Idle from 60 to 90; launched at 84, after waiting from 64 to 80.
    second = gaps["other", "cudaGraphLaunch"]
    assert (second.idle_s, second.host_late_s) == (pytest.approx(30e-6), pytest.approx(8e-6))
    assert trace.end == 105, "the call ends when the GPU has finished"
    assert sum(gap.idle_s for gap in gaps.values()) == pytest.approx(105e-6 - 55e-6)


def test_memory_knows_who_holds_it(trace: Trace) -> None:
    usage = breakdown.memory(trace)
    assert usage is not None
    assert (usage.kind, usage.before_bytes, usage.peak_bytes) == ("CUDA tensors", 5000, 6500)
    assert usage.at_peak_bytes == {"before the call": 5000, "denoiser": 1500}
    assert usage.peak_by_component_bytes == {"denoiser": 6500, "other": 5500}
    assert usage.points[-1] == (pytest.approx(70e-6), 4800)


def test_a_call_without_a_gpu() -> None:
    events = [event for event in EVENTS if event["cat"] in ("cpu_op", "user_annotation")]
    trace = read_chrome_trace([*events, memory(15, 300, 1, 0, 0), memory(16, -100, 2, 0, 0)])
    assert breakdown.gaps(trace) == breakdown.kernels(trace) == []
    usage = breakdown.memory(trace)
    assert usage is not None
    assert (usage.kind, usage.before_bytes, usage.peak_bytes) == ("CPU tensors", 0, 300)
    assert usage.at_peak_bytes == {"denoiser": 300}


def test_compiling_inside_the_call_is_seen() -> None:
    tuned = host("InductorBenchmarker.benchmark_gpu (dynamo_timed)", 30, 5)
    assert read_chrome_trace([*EVENTS, tuned]).compiling == [tuned["name"]]
    assert read_chrome_trace(EVENTS).compiling == []
    after = tuned | {"ts": 150}
    assert read_chrome_trace([*EVENTS, after]).compiling == []


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("aten::addmm", "GEMM"),
        ("aten::_scaled_mm", "GEMM"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128>", "GEMM"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_TNT", "GEMM"),
        ("aten::cudnn_convolution", "convolution"),
        ("sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc", "convolution"),
        ("aten::_scaled_dot_product_flash_attention", "attention"),
        ("triton_red_fused__softmax_14", "attention"),
        ("aten::native_layer_norm", "norm"),
        ("void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<c10::Half, float, int>", "norm"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::silu>", "elementwise"),
        ("triton_poi_fused_add_silu_3", "elementwise"),
        ("aten::copy_", "copy"),
        ("Memcpy DtoH (Device -> Pageable)", "copy"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("aten::convert_to_something", None),
        ("aten::transpose", None),
        ("cudaLaunchKernel", None),
    ],
)
def test_families(name: str, family: str | None) -> None:
    assert family_of(name) == family
