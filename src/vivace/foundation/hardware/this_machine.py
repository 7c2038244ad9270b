"""This machine's GPU by NVIDIA's library, without torch."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Present:
    """A GPU of this machine: its name and memory as the driver has them."""

    name: str
    memory_bytes: int
    free_bytes: int


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def this_gpu() -> str | None:
    """Return the name of this machine's first visible GPU; None without one."""
    gpu = present_gpu()
    return None if gpu is None else gpu.name


def present_gpu() -> Present | None:
    """Return this machine's first visible GPU; None without one, or without NVIDIA's driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if not visible or visible == "-1":
        return None
    handle, name, memory = ctypes.c_void_p(), ctypes.create_string_buffer(96), _Memory()
    index = ctypes.c_uint(int(visible) if visible.isdecimal() else 0)
    try:
        if nvml.nvmlInit_v2() != 0:
            return None
        is_there = (
            nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0
            and nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name))) == 0
            and nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
        )
        nvml.nvmlShutdown()
    except AttributeError:  # a library of that name without these functions
        return None
    if not is_there:
        return None
    return Present(name.value.decode(errors="replace"), int(memory.total), int(memory.free))


_UUID_BYTES = 96
_MIG_IS_ON = 1


def gpu_uuids(load: Any = ctypes.CDLL) -> tuple[str, ...]:
    """Return the UUIDs of all of this machine's GPUs, by the driver; empty where CUDA may see others.

    That is without NVIDIA's driver, with CUDA_VISIBLE_DEVICES, and where a GPU is divided into several (MIG).

    Args:
        load: opens the driver's library by its name.
    """
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return ()
    try:
        nvml = load("libnvidia-ml.so.1")
    except OSError:
        return ()
    count = ctypes.c_uint()
    try:
        if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        uuids = [_uuid(nvml, index) for index in range(count.value)]
        nvml.nvmlShutdown()
    except AttributeError:  # a library of that name without these functions
        return ()
    return tuple(uuid for uuid in uuids if uuid is not None) if None not in uuids else ()


def _uuid(nvml: Any, index: int) -> str | None:
    """Return the UUID of a GPU; None if it is unknown, or the GPU is divided."""
    handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
    current, pending = ctypes.c_uint(), ctypes.c_uint()
    if (
        nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0
        or nvml.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(_UUID_BYTES)) != 0
    ):
        return None
    mode = nvml.nvmlDeviceGetMigMode(handle, ctypes.byref(current), ctypes.byref(pending))
    is_divided = mode == 0 and current.value == _MIG_IS_ON  # GPUs that cannot be divided answer with an error
    return None if is_divided else uuid.value.decode()


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
