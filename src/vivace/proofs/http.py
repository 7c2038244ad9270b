"""HTTP with the standard library: bounded answers, patience with busy servers, and no redirects.

A redirect would send the prompt to a host that the user did not name. Answers 429 and 503 are tried again, after the
time that the server asks for with Retry-After, and later each time.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn
from urllib.parse import urlsplit

from vivace.foundation.untrusted.files import parse_json
from vivace.foundation.untrusted.streams import plain

MAX_ANSWER_BYTES = 200_000_000
_CHUNK_BYTES = 1 << 20
_BUSY = (429, 503)
_MOST_TRIES = 8
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 60.0
_HERE = ("127.0.0.1", "::1", "localhost")


class NoAnswer(Exception):
    """A server gave no answer; the message says why."""


class NoConnection(NoAnswer):
    """No connection to the server."""


@dataclass(frozen=True)
class HttpAnswer:
    """A server's answer.

    Attributes:
        seconds: of the last try.
        retry_after_s: how long the server asks to wait; None if it does not say.
        busy: the statuses of earlier tries, at which the server was busy.
    """

    status: int
    content: bytes
    seconds: float
    retry_after_s: float | None = None
    busy: tuple[int, ...] = ()

    @property
    def is_busy(self) -> bool:
        return self.status in _BUSY

    @property
    def is_refusal(self) -> bool:
        return 400 <= self.status < 500 and not self.is_busy

    @property
    def complaint(self) -> str:
        """The status with the server's own words, shortened."""
        text = " ".join(plain(_message(self.content)).split())
        return f"HTTP {self.status}" + (f": {text[:300]}" if text else "")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> NoReturn:
        raise NoAnswer(f"it redirects to {plain(newurl)[:200]}; give that address if it is the right one")


def send(url: str, body: dict[str, Any] | None, timeout_s: float, key: str | None = None) -> HttpAnswer:
    """Send one request, a POST of JSON if there is a body, and return the answer, whatever its status.

    Args:
        key: sent with the request.

    Raises:
        NoAnswer: the server cannot be reached, is too slow, or sends too much.
    """
    headers = {"Accept": "application/json, image/*"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers)
    began = time.monotonic()
    try:
        try:
            with _opener(url).open(request, timeout=timeout_s) as reply:
                return HttpAnswer(reply.status, _read(reply, began + timeout_s), time.monotonic() - began)
        except urllib.error.HTTPError as error:
            with error:
                content = error.read(10_000)
                wait_s = _seconds(error.headers.get("Retry-After"))
                return HttpAnswer(error.code, content, time.monotonic() - began, wait_s)
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise _too_slow(timeout_s) from None
        if isinstance(error.reason, ssl.SSLError):
            raise NoConnection(
                f"no secure connection ({_why_insecure(error.reason)}); for a certificate of your own, name it: "
                "SSL_CERT_FILE=CERTIFICATE.pem vivace ..."
            ) from None
        raise NoConnection(f"no connection ({error.reason}); is the server running?") from None
    except TimeoutError:
        raise _too_slow(timeout_s) from None
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"the connection broke ({str(error) or type(error).__name__})") from None


def send_patiently(
    url: str,
    body: dict[str, Any] | None,
    timeout_s: float,
    key: str | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> HttpAnswer:
    """Send one request, again while the server says that it is busy.

    Raises:
        NoAnswer: as `send`.
    """
    busy: tuple[int, ...] = ()
    for attempt in range(_MOST_TRIES):
        answer = send(url, body, timeout_s, key)
        if answer.status not in _BUSY:
            break
        if attempt + 1 < _MOST_TRIES:
            busy = (*busy, answer.status)
            growing_s = _FIRST_WAIT_S * 2**attempt
            wait_s = growing_s if answer.retry_after_s is None else max(answer.retry_after_s, growing_s / 5)
            sleep(min(_LONGEST_WAIT_S, wait_s))
    return replace(answer, busy=busy)


def has_same_host(url: str, other: str) -> bool:
    """Return whether two addresses are of the same server."""
    a, b = urlsplit(url), urlsplit(other)
    return (a.scheme, a.hostname, a.port) == (b.scheme, b.hostname, b.port)


def _why_insecure(error: ssl.SSLError) -> str:
    return str(getattr(error, "verify_message", "") or error.reason or error)


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Return an opener of addresses without a proxy, which would not reach a server on this host."""
    if urlsplit(url).hostname in _HERE:
        return urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(_NoRedirects)


def _read(reply: Any, until: float) -> bytes:
    """Return the body. The time limit of the socket holds for each piece, so a server could send for ever."""
    content = bytearray()
    while piece := reply.read1(_CHUNK_BYTES):
        content += piece
        if len(content) > MAX_ANSWER_BYTES:
            raise NoAnswer(f"the answer has more than {MAX_ANSWER_BYTES:,} bytes")
        if time.monotonic() > until:
            raise TimeoutError
    return bytes(content)


def _seconds(text: str | None) -> float | None:
    """Return the seconds of a Retry-After header; None for a date, which servers of images do not send."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None


def _message(content: bytes) -> str:
    """Return the message of an error as OpenAI writes it; the answer itself for all others."""
    text = content[:2000].decode("utf-8", "replace")
    try:
        reply = parse_json(content)
    except ValueError:
        return text
    error = reply.get("error", reply.get("detail")) if isinstance(reply, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message[:2000] if isinstance(message, str) and message else text


def _too_slow(timeout_s: float) -> NoAnswer:
    return NoAnswer(f"no answer within {timeout_s:g} s; give a larger --timeout")
