"""What a worker is sent and what it sends: requests and events, each one line of JSON."""

from __future__ import annotations

import json
import os
import selectors
import time
from typing import Any, TextIO

from vivace.spec.base import Spec

Event = dict[str, Any]
TIMEOUT = "timeout"
"""The event of a deadline that passed."""


class LoggedRequest(Spec):
    """Base of requests to a resident worker.

    Attributes:
        log: file for the worker's standard output and error; set by the launcher.
    """

    log: str | None = None


def send_event(events: TextIO, event: Event) -> None:
    """Write an event as a line of JSON."""
    events.write(json.dumps(event) + "\n")
    events.flush()


def parse_event(line: bytes | str) -> Event | None:
    """Return the event of a line; None for the incomplete line of a process that was killed."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


class EventReader:
    """Events from a pipe, read with a deadline."""

    def __init__(self) -> None:
        self._fd = -1
        self._buffer = b""

    def watch(self, fd: int) -> None:
        self._fd = fd
        self._buffer = b""

    def next(self, deadline: float) -> Event | None:
        """Return the next event, {"event": "timeout"} at the deadline, or None when the pipe is closed."""
        while True:
            line, separator, rest = self._buffer.partition(b"\n")
            if separator:
                self._buffer = rest
                if (event := parse_event(line)) is not None:
                    return event
                continue
            with selectors.DefaultSelector() as selector:
                selector.register(self._fd, selectors.EVENT_READ)
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return {"event": TIMEOUT}
            chunk = os.read(self._fd, 1 << 16)
            if not chunk:
                return None
            self._buffer += chunk
