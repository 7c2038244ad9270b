"""The parent of forked rounds never initialises the CUDA driver; tested with a faked CUDA build of PyTorch."""

import subprocess
import sys

import pytest

_PRELUDE = """
import sys, types
import torch
import vivace.measure.machine as driver
from vivace.foundation.hardware import Present

woken = []
def wake():
    woken.append(True)
def properties(device=None):
    wake()
    return types.SimpleNamespace(major=9, minor=0)
def capability(device=None):
    wake()
    return (9, 0)
torch.version.cuda = "13.0"
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_properties = properties
torch.cuda.get_device_capability = capability
measured = eval(sys.argv[1])
driver.present_gpu = lambda: measured and Present('a GPU', 1, 1, measured)
"""


def run(program: str, capability: str) -> str:
    command = [sys.executable, "-c", _PRELUDE + program, capability]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.parametrize(("capability", "expected"), [("(9, 0)", "False"), ("None", "True")])
@pytest.mark.exhaustive("None*")
@pytest.mark.soak
def test_importing_asks_nvml_and_not_the_driver(capability: str, expected: str) -> None:
    """Without NVML the libraries do ask the driver, so the test can tell the two cases apart."""
    program = "from vivace.benchmark.rounds.worker import import_all\nimport_all()\nprint(bool(woken))"
    assert run(program, capability).splitlines()[-1] == expected


@pytest.mark.long
def test_pytorch_answers_again_afterwards() -> None:
    program = """
with driver.without_cuda_init():
    from torch.cuda import get_device_capability as kept
    assert kept() == (8, 6) and not woken
assert torch.cuda.get_device_capability is capability
print(kept(), len(woken))
"""
    assert run(program, "(8, 6)") == "(9, 0) 1"
