"""GPUs wait for each other: here processes on a CPU, in Triton's interpreter, with memory that all of them map."""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# Shared: a pad a process, the round that each has come to, and the number that ends all waiting.
PROCESS = """
import random, sys, time
import torch
from vivace.multi_gpu.gpu_barrier import wait_for_all

path, rank, num, rounds, begins = sys.argv[1], *map(int, sys.argv[2:])
shared = torch.from_file(path, shared=True, size=num * num + num + 1, dtype=torch.int32)
pads = torch.tensor([shared[k * num :].data_ptr() for k in range(num)])
come_to, over = shared[num * num : -1], shared[-1:]
count = torch.full((1,), begins, dtype=torch.int32)
for now in range(1, rounds + 1):
    time.sleep(random.random() * 0.01)
    come_to[rank] = now
    wait_for_all(pads, count, over, rank, num)
    assert min(come_to.tolist()) >= now, (rank, now, come_to.tolist())
    wait_for_all(pads, count, over, rank, num)
print("went on", flush=True)
"""


def start(path: Path, rank: int, num: int, rounds: int, begins: int = 0) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(path), *map(str, (rank, num, rounds, begins))],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(("num", "begins"), [(2, 0), (3, 0), (2, 2**31 - 7)])
def test_nobody_goes_on_before_all_are_there(tmp_path: Path, num: int, begins: int) -> None:
    memory = torch.from_file(
        str(tmp_path / "memory"), shared=True, size=num * num + num + 1, dtype=torch.int32
    )
    memory[: num * num] = begins  # as after so many rounds, so that counts pass the largest number
    processes = [start(tmp_path / "memory", rank, num, 15, begins) for rank in range(num)]
    for process in processes:
        said, complained = process.communicate(timeout=60)
        assert said == "went on\n", complained


def test_the_host_lets_go_of_who_waits_for_a_process_that_ended(tmp_path: Path) -> None:
    memory = torch.from_file(str(tmp_path / "memory"), shared=True, size=7, dtype=torch.int32)
    waits = start(tmp_path / "memory", 0, 2, 1)
    deadline = time.monotonic() + 60
    while memory[4] != 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    memory[5] = 1  # the other had come so far, and died
    time.sleep(1.0)
    assert waits.poll() is None, "nobody has let go of it"
    memory[6] = 1
    said, complained = waits.communicate(timeout=30)
    assert said == "went on\n", complained
