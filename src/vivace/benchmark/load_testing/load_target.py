"""The server under load: an OpenAI images endpoint, its model, and the body of each request."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import SplitResult, urlsplit, urlunsplit

from vivace.errors import Unsupported, UsageError
from vivace.foundation.untrusted.files import parse_json
from vivace.foundation.untrusted.streams import plain

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


# Each request opens a connection, as each of many users would. The answer is read as it comes, so that one process can
# wait for hundreds of images. Neither redirects nor proxies are followed: the server under load is the one that was
# named.
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


_MAX_SEED = 2**31 - 1
_OWN_FIELDS = ("prompt", "seed", "n", "size", "model", "response_format", "stream", "loras")
_ASK_S = 30.0
_MAX_ENTRY = 4000
"""Characters kept of a server's description of its model."""


@dataclass(frozen=True)
class Variant:
    """Differences between requests other than the prompt and the seed."""

    size: str | None = None
    lora: str | None = None


@dataclass(frozen=True)
class LoadTarget:
    """A server and the requests to send to it.

    Attributes:
        url: ends before `/images/generations`.
        model: None for a server that lists none.
        fields: of every request.
        without: fields that requests would have, and this server does not know.
        variants: one of which each request has at random.
        key: that requests bear; it is stored nowhere.
        entry: the server's description of its model.
        seen: the bodies of requests by the sha256 of the images that they brought.
    """

    url: str
    model: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    prompts: tuple[str, ...] = ()
    variants: tuple[Variant, ...] = (Variant(),)
    without: frozenset[str] = frozenset()
    timeout_s: float = 600.0
    key: str | None = field(default=None, repr=False)
    entry: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, bytes] = field(default_factory=dict, repr=False, compare=False)

    @property
    def images_url(self) -> SplitResult:
        return urlsplit(f"{self.url}/images/generations")

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        return headers if self.key is None else headers | {"Authorization": f"Bearer {self.key}"}

    def request(self, number: int, order: random.Random, *, cycles: bool) -> tuple[int, bytes]:
        """Return the variant and the body of a request. Each request has another seed.

        Args:
            cycles: take the variants in turn, not at random.
        """
        place = number % len(self.variants) if cycles else order.randrange(len(self.variants))
        variant = self.variants[place]
        body = self.fields | {
            "prompt": self.prompts[number % len(self.prompts)],
            "n": 1,
            "seed": order.randrange(_MAX_SEED),
            "response_format": "b64_json",
        }
        if self.model is not None:
            body["model"] = self.model
        if variant.size is not None:
            body["size"] = variant.size
        if variant.lora is not None:
            body["loras"] = [{"name": variant.lora}]
        return place, json.dumps({name: body[name] for name in body if name not in self.without}).encode()


def server_url(text: str) -> str:
    """Return the URL of an endpoint, without the route.

    Raises:
        UsageError: it is none.
    """
    parts = urlsplit(text.strip())
    try:
        is_complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_complete = False
    if not is_complete or parts.username is not None or parts.fragment or parts.query:
        raise UsageError(f"--endpoint {text[:200]}: give http://HOST:PORT/v1")
    if any(ord(letter) <= 32 or ord(letter) > 126 for letter in text.strip()):
        raise UsageError(f"--endpoint {plain(text[:200])}: an address has no spaces and only ASCII letters")
    path = parts.path.rstrip("/").removesuffix("/images/generations")
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def parse_fields(texts: Sequence[str]) -> dict[str, Any]:
    """Return further fields of each request, written NAME=VALUE, where VALUE may be JSON.

    Raises:
        UsageError: one is not written so, or is set by another option.
    """
    fields: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise UsageError(f"--field {text[:200]}: give NAME=VALUE, e.g. output_format=webp")
        if name in _OWN_FIELDS or name in fields:
            why = "is set for each request" if name in _OWN_FIELDS else "is there twice"
            raise UsageError(f"--field {text[:200]}: {name} {why}; leave it out")
        try:
            fields[name] = parse_json(value)
        except ValueError:
            fields[name] = value
    return fields


async def with_model(target: LoadTarget) -> LoadTarget:
    """Return the target with the model that the server lists, and the server's description of it.

    Raises:
        Unsupported: no server answers, or it wants a key.
        UsageError: it lists several models.
    """
    try:
        reply = await exchange(urlsplit(f"{target.url}/models"), target.headers, None, _ASK_S)
    except ExchangeFailed as error:
        raise Unsupported(f"{target.url}: {error.kind} ({error}); is the server running?") from None
    if reply.status in (401, 403):
        raise Unsupported(f"{target.url} needs a key (HTTP {reply.status}); give --api-key-file FILE")
    entries = _entries(reply.content) if reply.status == 200 else []
    if target.model is None and len(entries) > 1:
        names = ", ".join(plain(str(entry["id"]))[:100] for entry in entries[:10])
        raise UsageError(f"{target.url} has {len(entries)} models; give --model, one of {names}")
    entry = next((entry for entry in entries if target.model in (None, entry["id"])), {})
    name = entry.get("id", target.model)
    kept = entry if len(json.dumps(entry)) <= _MAX_ENTRY else {"id": name}
    return replace(target, model=name, entry=kept)


def _entries(content: bytes) -> list[dict[str, Any]]:
    try:
        reply = parse_json(content)
    except ValueError:
        return []
    data = reply.get("data") if isinstance(reply, dict) else None
    entries = data if isinstance(data, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
