"""The fused kernels under Triton's interpreter and its compiler, each in a process of its own, which imports Triton."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vivace.contract import Machine

pytestmark = pytest.mark.long


def test_each_kernel_against_float64() -> None:
    run("tests.unit.kernels.interpreted", TRITON_INTERPRET="1")


def test_each_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    told = run("tests.unit.kernels.compiled_for_hopper", TRITON_CACHE_DIR=str(tmp_path))
    names = {line.partition(":")[0] for line in told.splitlines() if "registers" in line}
    assert {"_convolve", "_whole_group", "_apply", "_geglu", "_qk_norm_rope", "_skinny_product"} <= names, (
        told
    )


def run(module: str, **environment: str) -> str:
    if not Machine("cpu", "CPU", None, None).has_package("triton"):
        pytest.skip("Triton is not installed: PyTorch's packages for CPUs come without it")
    ran = subprocess.run(
        [sys.executable, "-m", module],
        cwd=Path(__file__).parents[3],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
