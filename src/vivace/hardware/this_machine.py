"""This machine's GPU by NVIDIA's library, without torch."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Present:
    """A GPU of this machine: its name and memory as the driver has them."""

    name: str
    memory_bytes: int


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
    return Present(name.value.decode(errors="replace"), int(memory.total)) if is_there else None
