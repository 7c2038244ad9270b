"""Connections that cost the server something and bring nothing are closed.

uvicorn closes those that wait for another request, and waits for the first one, for the rest of headers, and for a
client to take its answer, for ever. It takes as many connections as come, until the process has no file descriptors
left. And it reads nothing more once a client has sent another request before its answer, so that it does not see it
leave.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vivace.foundation.processes.open_files import allow_open_files

LOG = logging.getLogger("vivace.serve")
_LONGEST_HEADERS_S = 30.0
_LONGEST_STALL_S = 30.0
_LEAST_TAKEN = 32_768
"""Bytes of an answer that a client takes at least in `_LONGEST_STALL_S`, if as many are left."""
_MOST_CONNECTIONS = 2_000
_MOST_PIPELINED = 65_536
"""Bytes that are read of requests before the answer to the one before them."""
_FILES = 8_192
_OTHER_FILES = 256
"""File descriptors for pipes of workers, uploads and the like."""
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-type: text/plain\r\n"
    b"content-length: 22\r\nretry-after: 5\r\n\r\ntoo many connections.\r\n"
)


def most_connections() -> int:
    """Return how many connections there may be, and let this process have as many files as the system allows."""
    files = allow_open_files(_FILES)
    return _MOST_CONNECTIONS if files is None else min(_MOST_CONNECTIONS, files - _OTHER_FILES)


class Connection(H11Protocol):
    """A connection of a client.

    Attributes:
        most: connections at once; None until the first.
    """

    most: int | None = None
    _waiting: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _unsent = 0
    _idle_since = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._idle_since = time.monotonic()
        self._wait_for_headers()
        if Connection.most is None:
            Connection.most = most_connections()
        if len(self.connections) > Connection.most:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._wait_for_headers()
        else:
            self._stop_waiting()
            is_next_here = self.conn.their_state is h11.DONE
            if is_next_here and len(self.conn.trailing_data[0]) < _MOST_PIPELINED:
                self.flow.resume_reading()  # what is read last is that the client has gone

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, and end the request in whose body it is, as if its client had gone."""
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # the answer to that request has begun
            self.transport.close()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def _wait_for_headers(self) -> None:
        """Close the connection after a while, counted from the first byte and not from the last."""
        if self._waiting is None:
            self._idle_since = time.monotonic()
            self._waiting = self.loop.call_later(_LONGEST_HEADERS_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _watch(self) -> None:
        """Note how much of an answer is unsent, and check after a while that the client has taken some of it."""
        self._unsent = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(_LONGEST_STALL_S, self._check_stall)

    def _check_stall(self) -> None:
        num_taken = self._unsent - self.transport.get_write_buffer_size()
        if num_taken < _LEAST_TAKEN:
            LOG.warning("a client that does not take its answer is cut off, with %d bytes left", self._unsent)
            self.transport.abort()
        else:
            self._watch()

    def _stop_watching(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    @property
    def is_sending(self) -> bool:
        """Whether no whole request of the client is here, so that closing the connection ends no work."""
        return self._waiting is not None or (self.cycle is not None and self.cycle.more_body)

    def _make_room(self) -> None:
        """Close the connection that has waited longest for its client; this one if all others are at work."""
        others = [
            other
            for other in self.connections
            if isinstance(other, Connection) and other is not self and other.is_sending
        ]
        if others:
            oldest = min(others, key=lambda other: (other._waiting is None, other._idle_since))
            self.connections.discard(oldest)  # more connections may be made before its end is noticed
            oldest.transport.abort()
            return
        self.transport.write(_BUSY)
        self.transport.close()
