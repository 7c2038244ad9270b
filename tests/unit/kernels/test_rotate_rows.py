"""The kernel that rotates and quantises rows: in Triton's interpreter, and compiled for GPUs without fp8."""

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


def test_the_kernel_in_tritons_interpreter() -> None:
    program = """
import torch
from vivace.machinery.kernels.rotate_rows import rotate_rows
from vivace.machinery.quantization.rotated_int8 import quantise_rows, block_of
from tests.unit.kernels.interpreted import accept_loop_bounds
accept_loop_bounds()
for channels in (64, 320, 2304):
    rows = torch.randn(5, channels)
    rows[:, 3] *= 40
    rows[4] = 0
    codes, scale = rotate_rows(rows, block_of(channels))
    expected, expected_scale = quantise_rows(rows)
    torch.testing.assert_close(scale, expected_scale)
    off = (codes.int() - expected.int()).abs()
    assert off.max() <= 1 and (off > 0).float().mean() < 0.001, (channels, off.max(), (off > 0).sum())
"""
    assert_runs(program, TRITON_INTERPRET="1")


def test_the_kernel_compiles_for_gpus_without_fp8(tmp_path: os.PathLike[str]) -> None:
    program = """
import triton
from tests.unit.kernels.compiled import NoDevice, compiled
from tests.unit.kernels import launches
device = NoDevice()
triton.runtime.driver.set_active(device)
for capability in ((7, 5), (8, 0), (8, 6), (8, 9)):
    device.capability = capability
    made = compiled(capability, False, launches.rotated_rows)
    assert not made.failures and len(made.hashes) == 4, made.failures
    assert not made.spills, made.spills
"""
    assert_runs(program, TRITON_CACHE_DIR=str(tmp_path))


def assert_runs(program: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
