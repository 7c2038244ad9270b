"""Import libraries without initialising CUDA, which does not survive a fork.

When transformers imports torchao, torchao queries the GPU's compute capability to decide which kernels to register.
PyTorch would initialise CUDA to answer. NVML gives the same answer without initialising it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_cuda_init() -> Iterator[None]:
    """Answer queries for the first GPU's compute capability from NVML. Does nothing without NVML."""
    import torch
    import torch.utils._triton as triton

    measured = nvml_capability()
    if measured is None:
        yield
        return
    capability, has_triton = torch.cuda.get_device_capability, triton.has_triton
    is_active = True

    # A library may keep a reference to these functions; outside the context they call PyTorch's own.
    def nvml_device_capability(device: Any = None) -> tuple[int, int]:
        return measured if is_active else capability(device)

    def nvml_has_triton() -> bool:
        return triton.has_triton_package() and measured >= (7, 0) if is_active else bool(has_triton())

    torch.cuda.get_device_capability, triton.has_triton = nvml_device_capability, nvml_has_triton
    try:
        yield
    finally:
        is_active = False
        torch.cuda.get_device_capability, triton.has_triton = capability, has_triton


def nvml_capability() -> tuple[int, int] | None:
    """Return the compute capability of the first visible GPU; None without NVML or a GPU.

    If CUDA_VISIBLE_DEVICES is not a number, or CUDA orders different GPUs differently from NVML, this may be the
    capability of another GPU. It only decides which kernels a library prepares.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    index = int(first) if first.isdecimal() else 0
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    try:
        if nvml.nvmlInit_v2() != 0:
            return None
        succeeded = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) == 0 and (
            nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) == 0
        )
        nvml.nvmlShutdown()
    except AttributeError:  # a library of that name without these functions
        return None
    return (major.value, minor.value) if succeeded else None
