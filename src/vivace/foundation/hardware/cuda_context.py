"""Begin to use an NVIDIA GPU before PyTorch is imported.

The driver takes up to seconds to initialise itself and to create a process's context, and needs no lock of Python
meanwhile: in a thread it does so beside imports. PyTorch then uses the same context, since there is one a process.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

_LIBRARY = "libcuda.so.1"


def open_context(load: Any = ctypes.CDLL) -> bool:
    """Create the context of the first visible GPU; return False, and do nothing, where there is none.

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
