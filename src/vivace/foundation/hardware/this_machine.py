"""This machine's NVIDIA GPUs by the driver's library (NVML), without torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Present:
    """A GPU of this machine: its name, memory and compute capability as the driver has them."""

    name: str
    memory_bytes: int
    free_bytes: int
    capability: tuple[int, int] = (0, 0)


@contextmanager
def opened_nvml() -> Iterator[Any]:
    """Open NVML; yields its module, or the reason in words why it cannot be used."""
    try:
        import pynvml
    except ImportError:
        yield "nvidia-ml-py is not installed (pip install nvidia-ml-py)"
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield str(error)
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def this_gpu() -> str | None:
    """Return the name of this machine's first visible GPU; None without one."""
    gpu = present_gpu()
    return None if gpu is None else gpu.name


def present_gpu() -> Present | None:
    """Return this machine's first visible GPU; None without one, or without NVIDIA's driver. Where CUDA orders
    different GPUs differently from NVML, this may be another than PyTorch's first."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    with opened_nvml() as nvml:
        if isinstance(nvml, str) or not visible or visible == "-1":
            return None
        try:
            if visible.isdecimal():
                handle = nvml.nvmlDeviceGetHandleByIndex(int(visible))
            else:
                handle = nvml.nvmlDeviceGetHandleByUUID(visible)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
            return Present(nvml.nvmlDeviceGetName(handle), memory.total, memory.free, (major, minor))
        except nvml.NVMLError:
            return None


def gpu_index(uuid: str) -> int | None:
    """Return the number of a GPU among all of the host, as nvidia-smi counts them; None without NVML."""
    with opened_nvml() as nvml:
        if isinstance(nvml, str):
            return None
        try:
            return int(nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByUUID(uuid)))
        except nvml.NVMLError:
            return None


def gpu_uuids() -> tuple[str, ...]:
    """Return the UUIDs of all of this machine's GPUs, by the driver; empty where CUDA may see others. That is without
    NVIDIA's driver, with CUDA_VISIBLE_DEVICES, and where a GPU is divided into several (MIG)."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return ()
    with opened_nvml() as nvml:
        if isinstance(nvml, str):
            return ()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            return (
                ()
                if any(_is_divided(nvml, each) for each in handles)
                else tuple(nvml.nvmlDeviceGetUUID(each) for each in handles)
            )
        except nvml.NVMLError:
            return ()


def _is_divided(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:  # this GPU cannot be divided
        return False


_LIBRARY = "libcuda.so.1"


def open_context(load: Any = ctypes.CDLL) -> bool:
    """Create the context of the first visible GPU; return False, and do nothing, where there is none.

    The driver takes up to seconds to initialise itself and to create a process's context, and needs no lock of Python
    meanwhile: in a thread it does so beside imports. PyTorch then uses the same context, since there is one a process.
    What does not work here is an error of PyTorch later, with its reason.

    Args:
        load: opens the driver's library by its name.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as PyTorch does, before the driver reads it
    try:
        driver = load(_LIBRARY)
    except OSError:
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    return bool(
        driver.cuInit(0) == 0
        and driver.cuDeviceGet(ctypes.byref(device), 0) == 0
        and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    )
