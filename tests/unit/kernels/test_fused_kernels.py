"""The fused kernels under Triton's interpreter, in a process of its own: it is chosen when Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vivace.contract import Machine


@pytest.mark.long
def test_each_kernel_against_float64() -> None:
    if not Machine("cpu", "CPU", None, None).has_package("triton"):
        pytest.skip("Triton is not installed: PyTorch's packages for CPUs come without it")
    ran = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernels.interpreted"],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
