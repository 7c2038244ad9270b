"""Limits on a process until its next event, and a watch that enforces them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of a process."""

    seconds: float
    num_bytes: float

    def excess(self, pid: int, seconds: float) -> str | None:
        """Return the limit that a process exceeded `seconds` after it began; None without one."""
        import psutil

        if seconds > self.seconds:
            return f"{self.seconds:.0f} s"
        try:
            resident = psutil.Process(pid).memory_info().rss
        except psutil.Error:  # it ended
            return None
        return f"{self.num_bytes / 1e9:.1f} GB of memory" if resident > self.num_bytes else None


class LimitWatch:
    """Holds a process to the limits of an event ("limits" in it) until its next one.

    Attributes:
        pid: of the process.
        excess: what it used too much of; None if it was within its limits.
    """

    def __init__(self) -> None:
        self.pid = -1
        self.excess: str | None = None
        self._limits: ProcessLimits | None = None
        self._since = 0.0

    def follow(self, event: dict[str, Any]) -> None:
        """Start watching the limits of an event; an event without limits ends the watch."""
        self._limits = ProcessLimits(**event["limits"]) if event.get("limits") is not None else None
        self._since = time.monotonic()

    def next_look(self, deadline: float) -> float:
        """Return when to check the process again, `deadline` at the latest."""
        return deadline if self._limits is None else min(deadline, time.monotonic() + LOOK_EVERY_S)

    def is_excessive(self) -> bool:
        """Return whether the process is beyond its limits. From then on it has none."""
        assert self._limits is not None
        self.excess = self._limits.excess(self.pid, time.monotonic() - self._since)
        if self.excess is not None:
            self._limits = None
        return self.excess is not None
