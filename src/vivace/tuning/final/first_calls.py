"""Look at the first images of a search's baseline, so that a limit that cannot be kept is refused at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vivace.benchmark.progress import Forwarding

_SHARE_OF_FIRST = 0.5
"""Smallest time of a later call as a share of the first, which also loads kernels and chooses algorithms."""


@dataclass
class FirstCalls(Forwarding):
    """A `Progress` that passes everything on, and checks as calls end.

    Attributes:
        progress: receives everything.
        check: takes the least seconds of later calls, and their likely seconds. An error that it raises ends the round.
    """

    check: Callable[[float, float], None]
    _started: float = 0.0

    def event(self, event: dict[str, Any]) -> None:
        super().event(event)
        now = time.monotonic()
        if event.get("event") == "phase" and event.get("phase") == "warm-up":
            share = _SHARE_OF_FIRST if event["done"] == 1 else 1.0
            call_s = now - self._started
            self.check(share * call_s, call_s)
        self._started = now
