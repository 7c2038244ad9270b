"""Checks of a request before it is read: the key, the page that sends it, and the size of the body."""

from __future__ import annotations

import asyncio
import hmac
from typing import TYPE_CHECKING

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
_DRAINED = 64_000_000
_OPEN = "/livez"
"""The path that needs no key, for probes."""


class Checks:
    """ASGI middleware.

    Args:
        api_key: that requests must bear; None for none, and then only those that name this machine are answered.
        hosts: names of this machine, beside those of its loopback.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, hosts: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._hosts = hosts
        self._key = None if api_key is None else api_key.encode()

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
            await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
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
        await self._app(scope, _bounded(receive, largest), send)

    def _is_right(self, header: bytes) -> bool:
        scheme, _, key = header.partition(b" ")
        assert self._key is not None
        return hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"


def _not_this_machine(header: str, value: str) -> str:
    return (
        f"{header}: {value[:100]} is not this machine, whose server has no key; start it with --allow-host NAME, or "
        "with --api-key-file FILE"
    )


async def _too_large(scope: Scope, receive: Receive, send: Send, largest: int) -> None:
    """Refuse a body, having read the part that a client sends before it listens."""
    total = 0
    while total < _DRAINED:
        message = await receive()
        total += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    body = error_body(413, f"a body has at most {largest:,} bytes")
    await JSONResponse(body, 413, {"Connection": "close"})(scope, receive, send)


def _bounded(receive: Receive, largest: int) -> Receive:
    """Return `receive`, which ends a body that is too large or does not go on, as if its client had gone."""
    total, is_whole = 0, False

    async def bounded() -> Message:
        nonlocal total, is_whole
        if is_whole:  # what comes now is that the client has gone
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), _LONGEST_PAUSE_S)
        except TimeoutError:
            return {"type": "http.disconnect"}
        is_whole = not message.get("more_body")
        total += len(message.get("body", b""))
        return {"type": "http.disconnect"} if total > largest else message

    return bounded
