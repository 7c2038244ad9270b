"""Files that will be read are put into the system's cache, while libraries are imported."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

_MOST = 0.5
"""Of the free memory; files beyond it would drive out what is needed sooner."""
_CHUNK = 1 << 24


def read_ahead(files: Sequence[Path]) -> threading.Thread | None:
    """Ask the system to read files, in a thread that ends with this process.

    Returns:
        The thread; None where the system takes no such request, or has too little free memory.
    """
    if not hasattr(os, "posix_fadvise") or not files:
        return None
    import psutil

    try:
        total = sum(file.stat().st_size for file in files)
    except OSError:
        return None  # who loads them says so
    if total > _MOST * psutil.virtual_memory().available:
        return None
    thread = threading.Thread(target=_request, args=(files,), name="read-ahead", daemon=True)
    thread.start()
    return thread


def _request(files: Sequence[Path]) -> None:
    for file in files:
        try:
            number = os.open(file, os.O_RDONLY)
        except OSError:
            continue  # who loads it says so
        try:
            for offset in range(0, os.fstat(number).st_size, _CHUNK):
                os.posix_fadvise(number, offset, _CHUNK, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(number)
