"""The peak of this process's resident set."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

_OWN = Path("/proc/self")  # of Linux


def reset_resident_peak() -> None:
    """Reset the peak. Only Linux can, and only with permission; elsewhere the peak counts from the start."""
    with contextlib.suppress(OSError):
        (_OWN / "clear_refs").write_text("5", encoding="utf-8")


def peak_resident_bytes() -> int:
    """Return the peak of this process's resident set, in bytes."""
    with contextlib.suppress(OSError):
        for line in (_OWN / "status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if os.name == "posix":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    import psutil

    return int(psutil.Process().memory_info().peak_wset)
