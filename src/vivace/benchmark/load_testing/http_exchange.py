"""One HTTP exchange on asyncio, on a connection of its own, with bounded time and size.

Each request opens a connection, as each of many users would. The answer is read as it comes, so that one process can
wait for hundreds of images. Neither redirects nor proxies are followed: the server under load is the one that was
named.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from urllib.parse import SplitResult

MAX_ANSWER_BYTES = 200_000_000
_MAX_HEAD_BYTES = 1 << 16
_MAX_HEADERS = 200


class ExchangeFailed(Exception):
    """The server sent no answer.

    Attributes:
        kind: "no connection", "timeout" or "broken answer".
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Reply:
    """An answer, whatever its status. Names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    content: bytes


async def exchange(url: SplitResult, headers: dict[str, str], body: bytes | None, timeout_s: float) -> Reply:
    """Send a request, a POST if there is a body, and return the answer.

    Raises:
        ExchangeFailed: there is none within the time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _exchange(url, headers, body)
    except TimeoutError:
        raise ExchangeFailed("timeout", f"no answer within {timeout_s:g} s") from None


async def _exchange(url: SplitResult, headers: dict[str, str], body: bytes | None) -> Reply:
    context = ssl.create_default_context() if url.scheme == "https" else None
    port = url.port or (443 if context else 80)
    try:
        reader, writer = await asyncio.open_connection(url.hostname, port, ssl=context, limit=_MAX_HEAD_BYTES)
    except OSError as error:
        raise ExchangeFailed("no connection", str(error.strerror or error)) from None
    try:
        writer.write(_request(url, headers, body))
        await writer.drain()
        return await _reply(reader)
    except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise ExchangeFailed("broken answer", str(error) or type(error).__name__) from None
    finally:
        writer.transport.abort()


def _request(url: SplitResult, headers: dict[str, str], body: bytes | None) -> bytes:
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"Host: {url.netloc}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1") + (body or b"")


async def _reply(reader: asyncio.StreamReader) -> Reply:
    status = 100
    while 100 <= status < 200:  # "continue" comes before the answer
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, _, rest = head[0].partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit() or len(head) > _MAX_HEADERS:
            raise ValueError("the answer is not that of an HTTP server")
        status = int(rest[:3])
    pairs = [line.partition(":") for line in head[1:] if line]
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return Reply(status, headers, await _content(reader, headers))


async def _content(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return await _chunks(reader)
    length = headers.get("content-length")
    if length is not None:
        if not length.isdigit() or int(length) > MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of {length[:20]} bytes")
        return await reader.readexactly(int(length))
    content = bytearray()
    while piece := await reader.read(_MAX_HEAD_BYTES):
        content += piece
        _check_size(len(content))
    return bytes(content)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    content = bytearray()
    while True:
        line = (await reader.readuntil(b"\r\n")).split(b";")[0].strip()
        length = int(line, 16)
        if length < 0:
            raise ValueError("a chunk has a negative length")
        _check_size(len(content) + length)
        content += await reader.readexactly(length)
        if length == 0:
            return bytes(content)
        await reader.readexactly(2)


def _check_size(number: int) -> None:
    if number > MAX_ANSWER_BYTES:
        raise ValueError(f"the answer has more than {MAX_ANSWER_BYTES:,} bytes")
