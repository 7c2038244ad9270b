"""Connections, which are closed if the client takes too long to send the headers of a request.

uvicorn closes connections that wait for another request, but waits for ever for the first one and for the rest of
headers.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_LONGEST_HEADERS_S = 30.0


class Connection(H11Protocol):
    """A connection of a client."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._wait_for_headers()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_headers(self) -> None:
        """Close the connection after a while, counted from the first byte and not from the last."""
        if self._waiting is None:
            self._waiting = self.loop.call_later(_LONGEST_HEADERS_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
