"""Collect the Environment: the stable conditions that a measurement depends on besides the trial."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
import time
from pathlib import Path

from vivace.foundation.spec.environment import Environment
from vivace.measure.machine import this_machine
from vivace.measure.nvml import opened_gpu

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
# Paths, log levels and the way GPUs are counted do not change measurements.
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
    """Return the environment of this process for torch's type of device, with the current thread count."""
    import psutil
    import torch

    import vivace

    machine = this_machine(device)
    return Environment(
        vivace=vivace.__version__,
        source_revision=source_revision(Path(__file__).resolve().parents[3]),
        platform=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        device=device,
        device_name=machine.device_name,
        device_capability=".".join(map(str, machine.capability)) if machine.capability else None,
        driver=_driver() if machine.is_cuda else None,
        cpu=this_machine("cpu").device_name,
        num_cores=_num_cores(),
        num_threads=torch.get_num_threads(),
        memory_bytes=psutil.virtual_memory().total,
        libraries=library_versions(),
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLE_PREFIXES) and name not in _IGNORED_VARIABLES
        },
    )


def python_ms() -> float:
    """Return the milliseconds of a fixed Python loop (0.04 s of work in total), a measure of the CPU's current speed.
    Eager models of small kernels are bound by Python, and on a shared host others can use the cores without showing in
    this machine's load."""
    times = []
    for _ in range(9):
        start = time.perf_counter()
        total = 0
        for number in range(100_000):
            total += number
        times.append(1000 * (time.perf_counter() - start))
    return round(statistics.median(times), 3)


def conditions() -> dict[str, float | str]:
    """Return conditions that may disturb a measurement: CPU speed and load, free memory. On NVIDIA GPUs also clocks,
    temperature, power, throttling and the number of processes."""
    import psutil

    now: dict[str, float | str] = {
        "python_ms": python_ms(),
        "load_1min": round(psutil.getloadavg()[0], 2),
        "memory_available_bytes": float(psutil.virtual_memory().available),
    }
    return now | gpu_conditions()


def gpu_conditions() -> dict[str, float | str]:
    """Return the GPU of this process, its clock, temperature, power and throttling, and its number of processes. Empty
    without a GPU, and before CUDA is initialised: reading must not initialise it."""
    with opened_gpu() as gpu:
        if gpu is None:
            return {}
        if isinstance(gpu, str):
            return {"nvml": gpu}
        now, (index, uuid) = gpu.read(), gpu.identity()
        conditions = {
            "gpu_sm_clock_mhz": now.sm_clock_mhz,
            "gpu_temperature_c": now.temperature_c,
            "gpu_power_w": now.power_w,
            "gpu_throttle_reasons": float(now.throttle_bits),
            "gpu_processes": gpu.num_processes(),
            "gpu_index": index,
        }
        return {name: float(value) for name, value in conditions.items() if value is not None} | {
            "gpu_uuid": uuid
        }


DRIVER = Path("/proc/driver/nvidia/version")


def _driver() -> str | None:
    """Return the driver version, e.g. "580.159.04". Its position in the line differs between the kernel modules."""
    try:
        line = DRIVER.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return None
    match = re.search(r"\b\d+\.\d+(\.\d+)*\b", line)
    return match[0] if match else None


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that measurements depend on, by name."""
    import torch

    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__
    if torch.version.hip:
        versions["rocm"] = torch.version.hip
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
        versions["cudnn"] = str(torch.backends.cudnn.version())
    return versions


def _num_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # of Linux and some others
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def source_revision(root: Path) -> str | None:
    """Return the commit of a source checkout, and after a plus the hash of its changed Python files. Without that, a
    row of changed code would be taken for one of the commit, and not be measured again."""
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return None
    changes = _git(root, "diff", "HEAD", "--", "src/*.py")
    return f"{commit}+{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else commit


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=5,
            check=False,
            encoding="utf-8",
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
