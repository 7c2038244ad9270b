"""A profile on a GPU: kernels count once, and what only a GPU has is there."""

import json
from pathlib import Path

import pytest

import vivace
from tests.chrome_trace import assert_alike, read_chrome_trace
from vivace.measure.profiling.profiler import traced

pytestmark = pytest.mark.gpu


def test_a_profile_of_the_gpu_adds_up() -> None:
    profiled = vivace.profile("tiny-sd", num_inference_steps=4, device="cuda", calls=2)
    profile = profiled.profile
    assert profile.gpu_busy_s is not None
    assert profile.gpu_idle_s is not None
    assert profile.host_late_s is not None
    assert 0 < profile.gpu_busy_s < profile.traced_s
    assert profile.gpu_busy_s + profile.gpu_idle_s == pytest.approx(profile.traced_s)
    assert 0 < profile.host_late_s <= profile.gpu_idle_s
    rows = profiled.to_dicts()
    assert sum(row["self_cuda_percent"] for row in rows) == pytest.approx(100)
    assert sum(row["self_cpu_percent"] for row in rows) == pytest.approx(100)
    assert profile.self_cuda_s == pytest.approx(sum(kernel.cuda_s for kernel in profile.kernels))
    # One stream: nothing overlaps, so the kernels' sum is the time that the GPU is busy.
    assert profile.self_cuda_s == pytest.approx(profile.gpu_busy_s, rel=0.02)
    assert {"convolution", "GEMM"} <= {share.name for share in profile.families if share.cuda_s > 0}
    assert {share.name for share in profile.components if share.cuda_s > 0} >= {
        "denoiser",
        "vae",
        "text_encoder",
    }
    assert any(wait.kind == "synchronisation" and wait.line > 0 for wait in profile.waits)
    assert any(wait.kind == "copy" and wait.num_bytes > 0 for wait in profile.waits), "the image"
    assert profile.memory is not None
    assert profile.memory.kind == "CUDA tensors"
    assert profile.memory.peak_bytes > profile.memory.before_bytes > 1e6


def test_a_cuda_graph_has_rows_of_its_kernels() -> None:
    profile = vivace.profile("tiny-sd", "cuda_graph", num_inference_steps=4, device="cuda", calls=1).profile
    kernels = {kernel.name for kernel in profile.kernels}
    assert {row.name for row in profile.operators} & kernels
    assert next(share.cuda_s for share in profile.components if share.name == "denoiser") > 0


@pytest.mark.parametrize("recipe", ["baseline", "cuda_graph"])
def test_a_profile_reads_as_the_trace_that_it_writes(recipe: str, tmp_path: Path) -> None:
    with vivace.load("tiny-sd", recipe, device="cuda") as session:

        def call() -> None:
            session("a red circle", num_inference_steps=4)

        call()
        call()
        profile = traced(session.pipe, call, tmp_path / "t.json")
    expected = read_chrome_trace(json.loads((tmp_path / "t.json").read_text())["traceEvents"])
    assert any(event.launch is not None for event in profile.device)
    assert any(event.is_cuda for event in profile.memory)
    assert_alike(profile, expected)
