"""Import libraries without waking CUDA's driver, which does not survive a fork once it is awake.

torchao asks, while transformers imports it, what the GPU can do, to decide which of its kernels to register. PyTorch
would wake the driver to answer. NVML knows the same and leaves the driver asleep.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def asleep() -> Iterator[None]:
    """Within it, questions about the first GPU's capability are answered by NVML. Without NVML nothing changes."""
    import torch
    import torch.utils._triton as triton

    found = nvml_capability()
    if found is None:
        yield
        return
    capability, has_triton = torch.cuda.get_device_capability, triton.has_triton
    is_asleep = True

    # A library may keep these functions; afterwards they do what PyTorch's own do.
    def asked_capability(device: Any = None) -> tuple[int, int]:
        return found if is_asleep else capability(device)

    def asked_triton() -> bool:
        return triton.has_triton_package() and found >= (7, 0) if is_asleep else bool(has_triton())

    torch.cuda.get_device_capability, triton.has_triton = asked_capability, asked_triton
    try:
        yield
    finally:
        is_asleep = False
        torch.cuda.get_device_capability, triton.has_triton = capability, has_triton


def nvml_capability() -> tuple[int, int] | None:
    """Of the first GPU that this process may use; None without NVML or a GPU.

    Where CUDA_VISIBLE_DEVICES names no number, or CUDA counts unequal cards in an order of its own, this may be the
    capability of another card than the first; it only decides which kernels a library prepares.
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
        found = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) == 0 and (
            nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) == 0
        )
        nvml.nvmlShutdown()
    except AttributeError:  # a library of that name without these functions
        return None
    return (major.value, minor.value) if found else None
