"""A profile on a GPU: kernels count once, and what only a GPU has is there."""

import json
from pathlib import Path

import pytest

import vivace
from tests.chrome_trace import assert_alike, read_chrome_trace
from vivace.profiling.profiler import traced

pytestmark = pytest.mark.gpu


def test_a_profile_of_the_gpu_adds_up() -> None:
    found = vivace.profile("tiny-sd", num_inference_steps=4, device="cuda", calls=2)
    one = found.profile
    assert one.gpu_busy_s is not None
    assert one.gpu_idle_s is not None
    assert one.host_late_s is not None
    assert 0 < one.gpu_busy_s < one.traced_s
    assert one.gpu_busy_s + one.gpu_idle_s == pytest.approx(one.traced_s)
    assert 0 < one.host_late_s <= one.gpu_idle_s
    rows = found.to_dicts()
    assert sum(row["self_cuda_percent"] for row in rows) == pytest.approx(100)
    assert sum(row["self_cpu_percent"] for row in rows) == pytest.approx(100)
    assert one.self_cuda_s == pytest.approx(sum(kernel.cuda_s for kernel in one.kernels))
    # One stream: nothing overlaps, so the kernels' sum is the time that the GPU is busy.
    assert one.self_cuda_s == pytest.approx(one.gpu_busy_s, rel=0.02)
    assert {"convolution", "GEMM"} <= {share.name for share in one.families if share.cuda_s > 0}
    assert {share.name for share in one.components if share.cuda_s > 0} >= {"denoiser", "vae", "text_encoder"}
    assert any(wait.kind == "synchronisation" and wait.line > 0 for wait in one.waits)
    assert any(wait.kind == "copy" and wait.num_bytes > 0 for wait in one.waits), "the image"
    assert one.memory is not None
    assert one.memory.kind == "CUDA tensors"
    assert one.memory.peak_bytes > one.memory.before_bytes > 1e6


def test_a_cuda_graph_has_rows_of_its_kernels() -> None:
    one = vivace.profile("tiny-sd", "cuda_graph", num_inference_steps=4, device="cuda", calls=1).profile
    kernels = {kernel.name for kernel in one.kernels}
    assert {row.name for row in one.operators} & kernels
    assert next(share.cuda_s for share in one.components if share.name == "denoiser") > 0


@pytest.mark.parametrize("recipe", ["baseline", "cuda_graph"])
def test_a_profile_reads_as_the_trace_that_it_writes(recipe: str, tmp_path: Path) -> None:
    with vivace.load("tiny-sd", recipe, device="cuda") as session:

        def call() -> None:
            session("a red circle", num_inference_steps=4)

        call()
        call()
        found = traced(session.pipe, call, tmp_path / "t.json")
    wanted = read_chrome_trace(json.loads((tmp_path / "t.json").read_text())["traceEvents"])
    assert any(one.launch is not None for one in found.device)
    assert any(one.is_cuda for one in found.memory)
    assert_alike(found, wanted)
