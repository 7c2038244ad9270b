"""Checks of a request before it is read: the key, the page that sends it, and the size of the body."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from vivace.serve.hosts import foreign_header
from vivace.serve.responses import error_body

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGEST_BODY = 1_000_000
"""Most bytes of a body."""
LARGEST_UPLOAD = 32_000_000
"""Most bytes of a form with images."""
_UPLOADS = "/v1/images/edits"
_DIGITS = 20
_LONGEST_PAUSE_S = 30.0
"""Longest pause between two parts of a body, seconds."""
_LONGEST_BODY_S = 300.0
_DRAINED = 64_000_000
_SMALL_BODY = 65_536
"""Bytes of each body that are read in any case."""
_MOST_BYTES = 512_000_000
"""Most bytes of all bodies beyond that, from their first one until their answers."""
_OPEN = "/livez"
"""The path that needs no key, for probes."""
_PAGE = "/"
_PAGES_SCHEMES = 'Bearer, Basic realm="vivace, with its key as the password"'
"""A browser cannot send a bearer token, but asks for a password."""


class Checks:
    """ASGI middleware.

    Args:
        api_key: the key of requests; None for none, and then only requests that name this machine are answered.
        hosts: names of this machine, beside those of its loopback.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, hosts: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._hosts = hosts
        self._key = None if api_key is None else api_key.encode()
        self._bodies = Bodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if (
            self._key is not None
            and scope["path"] != _OPEN
            and not self._is_right(headers.get(b"authorization", b""))
        ):
            body = error_body(401, "give the server's key: Authorization: Bearer KEY")
            schemes = _PAGES_SCHEMES if scope["path"] == _PAGE else "Bearer"
            await JSONResponse(body, 401, {"WWW-Authenticate": schemes})(scope, receive, send)
            return
        if self._key is None and (foreign := foreign_header(scope["headers"], self._hosts)) is not None:
            await JSONResponse(error_body(403, _not_this_machine(*foreign)), 403)(scope, receive, send)
            return
        if scope["method"] == "POST" and headers.get(b"sec-fetch-site") == b"cross-site":
            body = error_body(403, "a page of another site may not draw here")
            await JSONResponse(body, 403)(scope, receive, send)
            return
        largest = LARGEST_UPLOAD if scope["path"] == _UPLOADS else LARGEST_BODY
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > _DIGITS or int(length) > largest:
            await _too_large(scope, receive, send, largest)
            return
        if scope["method"] == "HEAD":  # as GET; the server leaves the body of the answer out
            scope = {**scope, "method": "GET"}
        bounded = BoundedBody(receive, largest, self._bodies)
        has_begun = False

        async def begin(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, bounded.receive, begin)
        except asyncio.CancelledError:  # the server waits no longer for what it accepted
            if not has_begun:
                body = error_body(503, "the server ends before this request has its answer")
                await JSONResponse(body, 503, {"Connection": "close"})(scope, receive, send)
        finally:
            bounded.forget()

    def _is_right(self, header: bytes) -> bool:
        assert self._key is not None
        return hmac.compare_digest(_key_in(header), self._key)


def _key_in(header: bytes) -> bytes:
    """Return the key of an Authorization header: a bearer token, or the password that a browser asks for."""
    scheme, _, value = header.partition(b" ")
    match scheme.lower():
        case b"bearer":
            return value.strip()
        case b"basic":
            with contextlib.suppress(binascii.Error):
                return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    return b""


def _not_this_machine(header: str, value: str) -> str:
    return (
        f"{header}: {value[:100]} is not this machine, whose server has no key; start it with --allow-host NAME, or "
        "with --api-key-file FILE"
    )


async def _too_large(scope: Scope, receive: Receive, send: Send, largest: int) -> None:
    """Refuse a body. First read what the client is sending, so that it sees the answer, unless it waits for "100
    Continue"."""
    is_sent = all(name.lower() != b"expect" for name, _ in scope["headers"])
    total, until = 0, time.monotonic() + _LONGEST_PAUSE_S
    while is_sent and total < _DRAINED and time.monotonic() < until:
        try:
            message = await asyncio.wait_for(receive(), _LONGEST_PAUSE_S)
        except TimeoutError:
            break
        total += len(message.get("body", b""))
        is_sent = bool(message.get("more_body"))
    body = error_body(413, _at_most(largest))
    await JSONResponse(body, 413, {"Connection": "close"})(scope, receive, send)


@dataclass
class Bodies:
    """The bytes of all bodies in progress, beyond `_SMALL_BODY` of each."""

    num_bytes: int = 0


class BoundedBody:
    """The body of a request: one that is too large, or does not come, is refused, and so is too much at once.

    Args:
        most: bytes of it.
        bodies: all that are in progress.
    """

    def __init__(self, receive: Receive, most: int, bodies: Bodies) -> None:
        self._receive, self._most, self._bodies = receive, most, bodies
        self._total, self._counted = 0, 0
        self._is_whole = False
        self._until = time.monotonic() + _LONGEST_BODY_S

    async def receive(self) -> Message:
        if self._is_whole:  # what comes now is that the client has gone
            return await self._receive()
        pause = min(_LONGEST_PAUSE_S, self._until - time.monotonic())
        try:
            message = await asyncio.wait_for(self._receive(), max(0.0, pause))
        except TimeoutError:
            raise HTTPException(408, "the body does not come", {"Connection": "close"}) from None
        self._is_whole = not message.get("more_body")
        self._count(len(message.get("body", b"")))
        return message

    def _count(self, num_bytes: int) -> None:
        self._total += num_bytes
        if self._total > self._most:
            raise HTTPException(413, _at_most(self._most), {"Connection": "close"})
        large = max(0, self._total - _SMALL_BODY)
        self._bodies.num_bytes += large - self._counted
        self._counted = large
        if large and self._bodies.num_bytes > _MOST_BYTES:
            message = (
                f"bodies of {_MOST_BYTES:,} bytes are being read, and this one is large; send it again later"
            )
            raise HTTPException(503, message, {"Connection": "close", "Retry-After": "5"})

    def forget(self) -> None:
        """Note that the request has its answer."""
        self._bodies.num_bytes -= self._counted
        self._counted = 0


def _at_most(largest: int) -> str:
    return f"a body has at most {largest:,} bytes"
