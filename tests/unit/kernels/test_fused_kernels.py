"""The fused kernels under Triton's interpreter and its compiler, each in a process of its own, which imports Triton."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vivace.machinery.technique import Machine

pytestmark = pytest.mark.long
KERNELS = {
    "_convolve",
    "_add_parts",
    "_whole_group",
    "_apply",
    "_geglu",
    "_cross_attention",
    "_qk_norm_rope",
    "_skinny_product",
    "_swiglu",
    "_rms_residual",
    "_sigmoid_gate",
}
"""Some of those that have to be checked."""
CONVOLUTION = {"_convolve", "_add_parts"}


def test_each_kernel_against_float64() -> None:
    ran = run("tests.unit.kernels.interpreted", TRITON_INTERPRET="1")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert {line.partition(":")[0] for line in ran.stdout.splitlines() if "launches" in line} >= KERNELS


@pytest.mark.parametrize(
    ("capabilities", "kernels"),
    [
        (["9.0"], KERNELS),
        (["--sampled", "8.0", "8.6"], KERNELS - CONVOLUTION),
        (["--sampled", "8.9"], KERNELS),
        (["--sampled", "10.0", "12.0"], KERNELS),
    ],
)
def test_each_kernel_compiles(capabilities: list[str], kernels: set[str], tmp_path: Path) -> None:
    ran = run("tests.unit.kernels.compiled", *capabilities, TRITON_CACHE_DIR=str(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for compiled in ran.stdout.split("programs for")[:-1]:
        assert {line.partition(":")[0] for line in compiled.splitlines() if "registers" in line} >= kernels


MEGAPIXEL = ["1024x1024", "832x1216", "1216x832", "896x1152", "768x1344", "1344x768", "960x1088"]
"""Sizes that SDXL was trained with."""


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "convolutions"])
def test_another_size_of_sdxl_compiles_nothing(recipe: str) -> None:
    """A new size took 7.7 s where ten kernels were compiled for it, and 0.9 s where none was."""
    ran = run("tests.unit.kernels.compile_keys", "sdxl", *MEGAPIXEL, "--recipe", recipe)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    first, *others = [json.loads(line) for line in ran.stdout.splitlines()]
    assert first["new"] >= 15, "the first size compiles all of them"
    assert {"_moments", "_factors", "_apply", "_residual_norm"} <= first["kernels"].keys()
    assert [(each["size"], each["kernels"]) for each in others if each["new"]] == []


def test_sizes_far_from_another_compile_tiles_of_convolutions_and_rows_alone() -> None:
    """Which are chosen by how many programs fill the GPU: one choice for all would take up to 27 % longer."""
    ran = run("tests.unit.kernels.compile_keys", "sdxl", "1024x1024", "640x1536", "520x968", "512x512")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    _, wide, odd, small = [json.loads(line)["kernels"] for line in ran.stdout.splitlines()]
    assert wide.keys() <= {"_convolve"}
    assert odd.keys() <= {"_convolve", "_residual_norm"}
    assert small.keys() <= {"_convolve", "_residual_norm", "_whole_group", "_cross_attention", "_add_parts"}


def run(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    if not Machine("cpu", "CPU", None, None).has_package("triton"):
        pytest.skip("Triton is not installed: PyTorch's packages for CPUs come without it")
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).parents[3],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
