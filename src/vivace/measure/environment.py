"""Collect the Environment: everything stable that a measurement depends on besides the trial."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
import time
from pathlib import Path

from vivace.measure.machine import this_machine
from vivace.spec.environment import Environment

_LIBRARIES = ("torch", "diffusers", "transformers", "torchao", "accelerate", "triton", "numpy")
_VARIABLE_PREFIXES = (
    "TORCH",
    "PYTORCH",
    "CUDA_",
    "OMP_",
    "MKL_",
    "KMP_",
    "ONEDNN_",
    "DNNL_",
    "DIFFUSERS_",
    "NVIDIA_TF32",
)
# Where things lie, how loud they log and how GPUs are counted changes no measurement.
_IGNORED_VARIABLES = (
    "DIFFUSERS_DISABLE_REMOTE_CODE",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VERSION",
    "TORCH_LOGS",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_HOME",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
)


def environment(device: str) -> Environment:
    """The environment of this process for `device` ("cpu" or "cuda"), with the thread count now in force."""
    import psutil
    import torch

    import vivace

    machine = this_machine(device)
    return Environment(
        vivace=vivace.__version__,
        source_revision=_source_revision(),
        platform=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        device=device,
        device_name=machine.device_name,
        device_capability=".".join(map(str, machine.capability)) if machine.capability else None,
        driver=_driver() if machine.is_cuda else None,
        cpu=this_machine("cpu").device_name,
        num_cores=os.cpu_count() or 1,
        num_threads=torch.get_num_threads(),
        memory_bytes=psutil.virtual_memory().total,
        libraries=_libraries(),
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLE_PREFIXES) and name not in _IGNORED_VARIABLES
        },
    )


def python_ms() -> float:
    """Milliseconds of a fixed piece of Python, 0.04 s of work in all: how fast this process gets on just now.

    Eager models of small kernels wait for Python, and on a shared host others take its cores without a trace in this
    machine's load.
    """
    times = []
    for _ in range(9):
        start = time.perf_counter()
        total = 0
        for number in range(100_000):
            total += number
        times.append(1000 * (time.perf_counter() - start))
    return round(statistics.median(times), 3)


def conditions() -> dict[str, float | str]:
    """What may disturb a measurement just now: the CPU's speed and load, free memory; on NVIDIA GPUs clocks, heat,
    other processes."""
    import psutil

    now: dict[str, float | str] = {
        "python_ms": python_ms(),
        "load_1min": round(os.getloadavg()[0], 2),
        "memory_available_bytes": float(psutil.virtual_memory().available),
    }
    return now | _gpu_conditions()


def _gpu_conditions() -> dict[str, float | str]:
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    try:
        import pynvml
    except ImportError:
        return {"nvml": "not installed"}
    try:
        pynvml.nvmlInit()
        # CUDA_VISIBLE_DEVICES renumbers the GPUs for PyTorch, and NVML does not know.
        identity = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{identity}")
        found: dict[str, float | str] = {
            "gpu_sm_clock_mhz": float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            "gpu_temperature_c": float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
            "gpu_power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "gpu_throttle_reasons": float(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
            "gpu_processes": float(len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))),
        }
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return {"nvml": str(error)}
    return found


DRIVER = Path("/proc/driver/nvidia/version")


def _driver() -> str | None:
    """ "580.159.04", which the closed and the open module write at different places of their version line."""
    try:
        line = DRIVER.read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)*\b", line)
    return found[0] if found else None


def _libraries() -> dict[str, str]:
    import torch

    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def _source_revision() -> str | None:
    """The commit of a source checkout; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
