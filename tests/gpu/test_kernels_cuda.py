"""Attention kernels and torch.compile where only a CUDA device shows them. `python -m pytest -m gpu tests/gpu`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import vivace
from tests.families import build, draw, psnr
from vivace.errors import NoEffect, Unsupported
from vivace.machinery.attention_backends.kernels import unsupported_on
from vivace.machinery.attention_backends.redirection import RedirectedAttention
from vivace.machinery.technique import component_of
from vivace.measure.machine import this_machine
from vivace.measure.profiling.profiler import attention_kernels

pytestmark = pytest.mark.gpu
PACKAGES = ("flash3", "flash4", "sage", "xformers")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def on_gpu(family: str, recipe: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    return vivace.apply(build(family).to("cuda", dtype), recipe)


def kernels(session: Any) -> list[str]:
    parts = {"denoiser": component_of(session.pipe, "denoiser"), "vae": session.pipe.vae.decoder}
    return attention_kernels(parts, lambda: draw(session, num_inference_steps=1))


# flex


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["sd", "flux"])
def test_flex_draws_the_same_picture(family: str, dtype: torch.dtype) -> None:
    reference = draw(on_gpu(family, "baseline", dtype))
    made = on_gpu(family, "attention(flex)", dtype)
    for _ in range(2):
        assert psnr(draw(made), reference) > (50 if dtype == torch.float32 else 25)
    evidence = made.evidence()
    assert evidence["denoiser.attention_calls_flex"]
    assert "denoiser.attention_calls_left" not in evidence
    assert evidence["compiled_graphs"]
    assert made.refuted({}) is None
    inside = [name for name in kernels(made) if name.startswith("denoiser: ")]
    assert len(inside) == 1
    assert inside[0].startswith("denoiser: flex_attention x")


@pytest.mark.parametrize("recipe", ["compile", "compile(blocks=repeated)", "compile(reduce-overhead)"])
@pytest.mark.parametrize("family", ["sd", "flux"])
def test_flex_within_compiled_graphs(family: str, recipe: str) -> None:
    reference = draw(on_gpu(family, "baseline"))
    made = on_gpu(family, f"{recipe}+attention(flex)")
    for _ in range(3):
        picture = draw(made)
    assert psnr(picture, reference) > 25
    evidence = made.evidence()
    assert evidence["denoiser.attentions_compiled_flex"]
    assert made.refuted({}) is None


# targets


@pytest.mark.parametrize("backend", ["math", "efficient", "flash", "cudnn", "flex"])
@pytest.mark.parametrize("family", ["sd", "flux"])
def test_the_vaes_kernel(family: str, backend: str) -> None:
    reference = draw(on_gpu(family, "baseline"))
    try:
        made = on_gpu(family, f"attention({backend})@vae")
    except NoEffect as error:
        assert error.already_so
        return
    except Unsupported as error:
        assert "vae" in str(error)
        return
    assert psnr(draw(made), reference) > 25
    kernel_names = kernels(made)
    inside = [name for name in kernel_names if name.startswith("vae: ")]
    assert inside
    assert all(backend in name for name in inside), kernel_names
    assert made.refuted({"attention_kernels": kernel_names}) is None


def test_a_head_of_512_runs_with_efficient() -> None:
    try:
        made = vivace.load("synthetic:sd15", "attention(efficient)@vae", device="cuda")
    except NoEffect as error:
        assert error.already_so
        return
    made("a red circle", num_inference_steps=1, output_type="np")


# packages


@pytest.mark.parametrize("backend", PACKAGES)
@pytest.mark.parametrize("recipe", ["", "+compile", "+cuda_graph", "+fuse_qkv"])
def test_packages_where_they_are_installed(backend: str, recipe: str) -> None:
    # A model with heads of 64, which all of them take.
    try:
        made = vivace.load("synthetic:sdxl", f"attention({backend}){recipe}", device="cuda")
    except Unsupported as error:
        if str(error).startswith("attention: "):
            pytest.skip(str(error))
        raise
    reference = draw(vivace.load("synthetic:sdxl", device="cuda"), height=256, width=256)
    for _ in range(2):
        picture = draw(made, height=256, width=256)
    assert psnr(picture, reference) > (15 if backend == "sage" else 20)
    evidence = made.evidence()
    assert (
        evidence[f"denoiser.attention_calls_{backend}"] or evidence[f"denoiser.attentions_compiled_{backend}"]
    )
    assert made.refuted({}) is None


# compile


@pytest.mark.parametrize("blocks", ["whole", "repeated"])
@pytest.mark.parametrize("family", ["sd", "flux"])
def test_a_second_size_is_not_compiled_again(family: str, blocks: str) -> None:
    made = on_gpu(family, f"compile(dynamic=True, blocks={blocks})")
    graphs = []
    for height in (64, 96):
        reference = draw(on_gpu(family, "baseline"), height=height)
        assert psnr(draw(made, height=height), reference) > 25
        graphs.append(made.evidence()["compiled_graphs"])
    assert graphs[0] == graphs[1]


_PROCESS = """
import json, time, torch, vivace
session = vivace.load("tiny-sd", RECIPE, device="cuda")
start = time.perf_counter()
session("a red circle", num_inference_steps=2)
torch.cuda.synchronize()
print(json.dumps(session.evidence() | {"first_call_s": time.perf_counter() - start}))
"""


@pytest.mark.parametrize("recipe", ["compile", "compile(blocks=repeated)", "attention(flex)"])
def test_a_second_process_starts_warm(recipe: str, tmp_path: Path) -> None:
    environment = {
        k: v for k, v in os.environ.items() if k not in {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    }
    environment.pop("VIVACE_CACHE", None)
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    runs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _PROCESS.replace("RECIPE", repr(recipe))],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    cold, warm = runs
    print(recipe, cold["first_call_s"], warm["first_call_s"])
    assert (cold["graphs_from_cache"], warm["graphs_not_in_cache"]) == (0, 0)
    assert warm["graphs_from_cache"] == cold["graphs_not_in_cache"] > 0
    assert warm["first_call_s"] < cold["first_call_s"]


@pytest.mark.parametrize("backend", ["flash3_fp8", "cudnn_fp8"])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_attention_in_fp8(backend: str, scale: float) -> None:
    if (reason := unsupported_on(backend, this_machine("cuda"))) is not None:
        pytest.skip(reason)
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (2, 4, 640, 128)
    query, key, value = (
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    value *= scale
    expected = F.scaled_dot_product_attention(query.float(), key.float(), value.float())
    redirected = RedirectedAttention(backend)

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value)

    def error(actual: torch.Tensor) -> float:
        return float((actual.float() - expected).norm() / expected.norm())

    with torch.no_grad(), redirected.inside():
        assert 0.005 < error(attend()) < 0.1
        assert error(torch.compile(attend, fullgraph=True)()) < 0.1
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = attend()
        graph.replay()
        assert error(captured) < 0.1
    assert redirected.left == {}
    assert redirected.num_compiled == 1
