"""One request and its outcome."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin, urlsplit

from PIL import Image

from vivace.benchmark.load_testing.http_exchange import ExchangeFailed, Reply, exchange
from vivace.benchmark.load_testing.load_rows import DONE
from vivace.benchmark.load_testing.load_target import LoadTarget
from vivace.errors import UsageError
from vivace.foundation.untrusted.files import parse_json
from vivace.foundation.untrusted.image_files import FORMATS, MAX_PIXELS
from vivace.foundation.untrusted.reading import reading
from vivace.foundation.untrusted.terminal_text import plain

_ADDRESS = re.compile(rb'"url"\s*:\s*"(?!data:)([^"]*)"')
_DATA = re.compile(r"data:image/[\w.+-]+;base64,")
_PHASE = re.compile(r"([A-Za-z][\w-]*)\s*;[^,]*?dur=([0-9.]+)")
_MAX_PHASES = 20
_MAX_SHORT = 1 << 16
_CHECKS = ThreadPoolExecutor(2, thread_name_prefix="answers")
"""Decode images beside the event loop, which has other requests to time."""


@dataclass(frozen=True)
class RequestOutcome:
    """The outcome of a request.

    Attributes:
        kind: "done", or what went wrong, as it is counted; of an answer with status 200 only `checked` tells.
        ended: of `time.perf_counter`.
        message: the server's own words.
        retry_after_s: how long a busy server asks to wait.
    """

    kind: str
    ended: float
    phases_ms: dict[str, float]
    message: str = ""
    retry_after_s: float | None = None
    status: int | None = None
    check: asyncio.Future[str] | None = field(default=None, compare=False)

    async def checked(self) -> str:
        """Return the kind, once the image has been looked at."""
        return self.kind if self.check is None else await self.check


async def send(target: LoadTarget, body: bytes) -> RequestOutcome:
    """Send a request and return its outcome; no failure of the server raises."""
    try:
        reply = await exchange(target.images_url, target.headers, body, target.timeout_s)
    except ExchangeFailed as error:
        return RequestOutcome(error.kind, time.perf_counter(), {}, plain(str(error))[:300])
    ended = time.perf_counter()
    if reply.status != 200:
        wait_s = _seconds(reply.headers.get("retry-after"))
        return RequestOutcome(f"HTTP {reply.status}", ended, {}, _complaint(reply), wait_s, reply.status)
    phases, content = phases_of(reply.headers.get("server-timing", "")), reply.content
    if addresses := _ADDRESS.findall(content[:_MAX_SHORT]):
        url = urlsplit(urljoin(f"{target.url}/", addresses[0].decode("utf-8", "replace").replace("\\/", "/")))
        if url.netloc != target.images_url.netloc:
            return RequestOutcome(
                "image on another server", ended, phases, plain(url.netloc)[:300], status=200
            )
        try:
            reply = await exchange(url, target.headers, None, target.timeout_s)
        except ExchangeFailed as error:
            return RequestOutcome(error.kind, time.perf_counter(), phases, plain(str(error))[:300])
        ended = time.perf_counter()
        if reply.status != 200:
            return RequestOutcome(f"HTTP {reply.status}", ended, phases, "of the image", status=reply.status)
        content = reply.content
    check = asyncio.get_running_loop().run_in_executor(_CHECKS, fault_of, target, body, content)
    return RequestOutcome(DONE, ended, phases, status=200, check=check)


def fault_of(target: LoadTarget, body: bytes, content: bytes) -> str:
    """Decode an answer; return "done", or what is wrong with it, as it is counted.

    It is one image, whole, of the size and the format that were asked for, and no other request has had it.

    Args:
        content: JSON with the image in base64, or the image's file.
    """
    asked: dict[str, Any] = parse_json(body)
    data = content
    if content[:1] in b"{[":
        try:
            images = parse_json(content)["data"]
            if len(images) != 1:
                return f"{len(images) or 'no'} image{'s' * (len(images) > 1)}"
            (image,) = images
            text = image.get("b64_json") or image["url"]
            data = base64.b64decode(_DATA.sub("", text, count=1), validate=True)
        except (ValueError, KeyError, TypeError, AttributeError):
            return "no image"
    try:
        with reading("the answer", UsageError), Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            size, format_ = f"{picture.width}x{picture.height}", (picture.format or "").lower()
            if asked.get("size", size) not in (size, "auto"):
                return f"{size} instead of {asked['size']}"
            wanted = asked.get("output_format", format_)
            if format_ != {"jpg": "jpeg"}.get(wanted, wanted):
                return f"{format_} instead of {wanted}"
            if picture.width * picture.height > MAX_PIXELS:
                return f"{size}, too large to look at"
            picture.load()
    except UsageError:
        return "broken image"
    same = target.seen.setdefault(hashlib.sha256(data).hexdigest(), body)
    return DONE if same == body else "same image for another seed or prompt"


def phases_of(header: str) -> dict[str, float]:
    """Return the milliseconds of a Server-Timing header by name."""
    phases: dict[str, float] = {}
    for name, text in _PHASE.findall(header[:4000])[:_MAX_PHASES]:
        try:
            phases[name] = float(text)
        except ValueError:  # 1.2.3
            continue
    return phases


def _seconds(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None


def _complaint(reply: Reply) -> str:
    """Return the message of an error as OpenAI writes it, or the beginning of the answer."""
    text = reply.content[:2000].decode("utf-8", "replace")
    try:
        content = parse_json(reply.content[:100_000])
    except ValueError:
        content = None
    error = content.get("error", content.get("detail")) if isinstance(content, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(plain(message if isinstance(message, str) else text).split())[:300]
