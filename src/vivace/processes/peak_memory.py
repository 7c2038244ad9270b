"""The peak of this process's resident set."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from vivace.processes.system import is_linux, is_posix


def reset_resident_peak() -> None:
    """Let the peak begin anew. Linux alone can, and not without permission: elsewhere it goes on from the start."""
    if is_linux():
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_resident_bytes() -> int:
    """Return the peak of this process's resident set, in bytes."""
    if is_linux():
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    if is_posix():
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    import psutil

    memory = psutil.Process().memory_info()
    return int(getattr(memory, "peak_wset", memory.rss))  # Windows alone counts a peak
