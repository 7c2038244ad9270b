"""Checks of a request before it is read: the key, the page that sends it, and the size of the body; and its line in the
access log."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from vivace.serve.http.access import Keys, foreign_header, is_of_page
from vivace.serve.http.responses import error_body

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ACCESS = logging.getLogger("vivace.serve.access")
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
FILES = "/v1/images/files/"
"""Images by names that cannot be guessed, for browsers, which send no key with an image."""
_PROBES = ("/livez", "/readyz", "/metrics")
"""Paths whose answers are not logged while they succeed."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_ID_HEADER = b"x-request-id"
_PAGE = "/"
_CLOSE = {"Connection": "close"}
_PAGES_SCHEMES = 'Bearer, Basic realm="vivace, with its key as the password"'
"""A browser cannot send a bearer token, but asks for a password."""


class Checks:
    """ASGI middleware.

    Args:
        keys: of requests; None for none, and then only requests that name this machine are answered.
        hosts: names of this machine, beside those of its loopback.
        observe: called with the path and the status of each answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys | None,
        hosts: tuple[str, ...] = (),
        origins: tuple[str, ...] = (),
        observe: Callable[[str, int], None] = lambda path, status: None,
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._keys = keys
        self._origins = frozenset(origin.encode() for origin in origins)
        self._observe = observe
        self._bodies = Bodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and let it be answered, under an id of its own or the client's."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        headers = {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(_ID_HEADER, b"").decode("latin-1")
        request_id = given if _ID.fullmatch(given) else secrets.token_hex(8)
        scope.setdefault("state", {})["owner"] = ""
        status: int | None = None

        async def name_and_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (_ID_HEADER, request_id.encode())]
            await send(message)

        try:
            refusal = self._refusal(scope, headers)
            if refusal is not None:
                if refusal.status_code == 413 and b"expect" not in headers:
                    await _drain(receive)
                await refusal(scope, receive, name_and_send)
                return
            if scope["method"] == "HEAD":  # as GET; the server leaves the body of the answer out
                scope = {**scope, "method": "GET"}
            bounded = BoundedBody(receive, _largest(scope["path"]), self._bodies)
            try:
                await self._app(scope, bounded.receive, name_and_send)
            except asyncio.CancelledError:  # the server waits no longer for what it accepted
                if status is None:
                    ends = _refused(503, "the server ends before this request has its answer", **_CLOSE)
                    await ends(scope, receive, name_and_send)
            finally:
                bounded.forget()
        except Exception:
            status = 500
            raise
        finally:
            path, owner = scope["path"], scope["state"]["owner"]
            status = status or 499
            self._observe(path, status)
            if status != 200 or path not in _PROBES:
                ACCESS.info(
                    "%s %s %s %d %.3f s%s",
                    request_id,
                    scope["method"][:20],
                    path[:100].encode("unicode_escape").decode(),
                    status,
                    time.monotonic() - began,
                    f" of {owner}" if owner else "",
                )

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> JSONResponse | None:
        """Return the answer to a request that must not be read; None to one that may."""
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # Whoever stands between may have read another length than this server, and what follows as a request.
            return _refused(400, "give Content-Length or Transfer-Encoding, not both", **_CLOSE)
        authorization, path = headers.get(b"authorization", b""), scope["path"]
        if self._keys is not None and path != _OPEN and not path.startswith(FILES):
            owner = self._keys.owner_of(_key_in(authorization))
            if owner is None:
                schemes = {"WWW-Authenticate": _PAGES_SCHEMES if path == _PAGE else "Bearer"}
                return _refused(401, "give the server's key: Authorization: Bearer KEY", **schemes)
            scope["state"]["owner"] = owner
        is_allowed = headers.get(b"origin") in self._origins
        named = [each for each in scope["headers"] if not (is_allowed and each[0] == b"origin")]
        if self._keys is None and (foreign := foreign_header(named, self._hosts)) is not None:
            header, value = foreign
            return _refused(
                403,
                f"{header}: {value[:100]} is not this machine, whose server has no key; start it with "
                "--allow-host NAME, or with --api-key-file FILE",
            )
        is_foreign = headers.get(b"sec-fetch-site") == b"cross-site" or (
            authorization[:5].lower() == b"basic" and not is_of_page(headers)
        )  # a browser sends the page's password with forms of other pages, too
        if scope["method"] == "POST" and is_foreign and not is_allowed:
            return _refused(403, "a page of another site may not draw here; allow it with --allowed-origins")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > _DIGITS or int(length) > _largest(path):
            return _refused(413, _at_most(_largest(path)), **_CLOSE)
        return None


def _refused(status: int, message: str, **headers: str) -> JSONResponse:
    return JSONResponse(error_body(status, message), status, headers)


def _largest(path: str) -> int:
    return LARGEST_UPLOAD if path == _UPLOADS else LARGEST_BODY


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


async def _drain(receive: Receive) -> None:
    """Read the rest of a body that is refused: a client that still sends sees a reset, and not the answer. One that
    waits for "100 Continue" sends nothing."""
    total, until, is_sent = 0, time.monotonic() + _LONGEST_PAUSE_S, True
    while is_sent and total < _DRAINED and time.monotonic() < until:
        try:
            message = await asyncio.wait_for(receive(), _LONGEST_PAUSE_S)
        except TimeoutError:
            return
        total += len(message.get("body", b""))
        is_sent = bool(message.get("more_body"))


@dataclass
class Bodies:
    """The bytes of all bodies in progress, beyond `_SMALL_BODY` of each."""

    num_bytes: int = 0


class BoundedBody:
    """The body of a request: one of too many bytes, or that does not come, is refused, and so is too much at once."""

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
            raise HTTPException(408, "the body does not come", _CLOSE) from None
        self._is_whole = not message.get("more_body")
        refusal = self._count(len(message.get("body", b"")))
        if refusal is not None:
            self.forget()
            if not self._is_whole:
                await _drain(self._receive)
            raise refusal
        return message

    def _count(self, num_bytes: int) -> HTTPException | None:
        """Count bytes of the body; return how it is refused, if it is."""
        self._total += num_bytes
        if self._total > self._most:
            return HTTPException(413, _at_most(self._most), _CLOSE)
        large = max(0, self._total - _SMALL_BODY)
        self._bodies.num_bytes += large - self._counted
        self._counted = large
        if large and self._bodies.num_bytes > _MOST_BYTES:
            message = (
                f"bodies of {_MOST_BYTES:,} bytes are being read, and this one is large; send it again later"
            )
            return HTTPException(503, message, {**_CLOSE, "Retry-After": "5"})
        return None

    def forget(self) -> None:
        self._bodies.num_bytes -= self._counted
        self._counted = 0


def _at_most(largest: int) -> str:
    return f"a body has at most {largest:,} bytes"
