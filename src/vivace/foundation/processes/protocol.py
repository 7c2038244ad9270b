"""Requests to a worker and its events, each one line of JSON."""

from __future__ import annotations

import json
import os
import queue
import selectors
import threading
import time
from typing import Any, TextIO

from vivace.foundation.processes.system import is_posix
from vivace.foundation.spec.base import Spec

Event = dict[str, Any]
TIMEOUT = "timeout"
"""The event of a deadline that passed."""
_CHUNK = 1 << 16


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
        self._chunks: queue.SimpleQueue[bytes] | None = None

    def watch(self, fd: int) -> None:
        """Read another pipe from now on. Where pipes cannot be waited for, a thread reads it."""
        self._fd = fd
        self._buffer = b""
        self._chunks = None
        if not is_posix():
            self._chunks = queue.SimpleQueue()
            threading.Thread(target=_read_all, args=(os.dup(fd), self._chunks), daemon=True).start()

    def next(self, deadline: float) -> Event | None:
        """Return the next event, {"event": "timeout"} at the deadline, or None when the pipe is closed."""
        while True:
            line, separator, rest = self._buffer.partition(b"\n")
            if separator:
                self._buffer = rest
                if (event := parse_event(line)) is not None:
                    return event
                continue
            chunk = self._chunk(max(0.0, deadline - time.monotonic()))
            if chunk is None:
                return {"event": TIMEOUT}
            if not chunk:
                return None
            self._buffer += chunk

    def _chunk(self, seconds: float) -> bytes | None:
        """Return the next bytes, b"" when the pipe is closed, or None if nothing comes in time."""
        if self._chunks is not None:
            try:
                chunk = self._chunks.get(timeout=seconds) if seconds else self._chunks.get_nowait()
            except queue.Empty:
                return None
            if not chunk:
                self._chunks.put(b"")  # it stays closed
            return chunk
        with selectors.DefaultSelector() as selector:
            selector.register(self._fd, selectors.EVENT_READ)
            if not selector.select(seconds):
                return None
        return os.read(self._fd, _CHUNK)


def _read_all(number: int, chunks: queue.SimpleQueue[bytes]) -> None:
    """Read a pipe to its end, and close it."""
    with os.fdopen(number, "rb", buffering=0) as pipe:
        while chunk := pipe.read(_CHUNK):
            chunks.put(chunk)
    chunks.put(b"")
