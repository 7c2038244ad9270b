"""One request and its outcome."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass

from vivace.benchmark.load_testing.http_exchange import ExchangeFailed, Reply, exchange
from vivace.benchmark.load_testing.load_rows import DONE
from vivace.benchmark.load_testing.load_target import LoadTarget
from vivace.foundation.untrusted.files import parse_json
from vivace.foundation.untrusted.terminal_text import plain

# Base64 of the first bytes of PNG, JPEG, WebP and AVIF files. The megabytes behind them are not parsed: that would keep
# the event loop from other requests.
_IMAGE = re.compile(rb'"b64_json"\s*:\s*"(?:data:image/\w+;base64,)?(iVBORw0KGgo|/9j/|UklGR|AAAA)')
_ADDRESS = re.compile(rb'"url"\s*:\s*"(?:https?:|/|data:image/)')
_PHASE = re.compile(r"([A-Za-z][\w-]*)\s*;[^,]*?dur=([0-9.]+)")
_MAX_PHASES = 20


@dataclass(frozen=True)
class RequestOutcome:
    """The outcome of a request.

    Attributes:
        kind: "done", or what went wrong, as it is counted.
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
    number = len(_IMAGE.findall(reply.content)) + len(_ADDRESS.findall(reply.content))
    kind = DONE if number == 1 else "no image" if number == 0 else f"{number} images"
    return RequestOutcome(kind, ended, phases_of(reply.headers.get("server-timing", "")), status=200)


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
