"""An OpenAI images endpoint over HTTP, for `vivace prove` and `vivace bench --endpoint`.

Answers have a time limit for the whole of them and a largest size. A redirect is not followed: it would send the prompt
to a host that the user did not name. Each request opens a connection of its own, as each of many users would.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import math
import ssl
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import SplitResult, urljoin, urlsplit, urlunsplit

import httpx2

from vivace.errors import Unsupported, UsageError
from vivace.foundation.untrusted.files import parse_json
from vivace.foundation.untrusted.streams import plain

MAX_ANSWER_BYTES = 200_000_000
FIRST_WAIT_S = 0.5
"""Wait after the first answer of a busy server; it doubles each time."""
IMAGES, MODELS = "/images/generations", "/models"
_BUSY = (429, 503)
_MOST_TRIES = 8
_LONGEST_WAIT_S = 60.0
_ASK_S = 30.0
_HERE = ("127.0.0.1", "::1", "localhost")
_Result = TypeVar("_Result")


class NoAnswer(Exception):
    """A server gave no answer; the message says why, and `kind` how it is counted."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class HttpAnswer:
    """A server's answer, whatever its status.

    Attributes:
        headers: by their names in lower case.
        seconds: of the last try.
        busy: the statuses of earlier tries, at which the server was busy.
    """

    status: int
    content: bytes
    headers: Mapping[str, str]
    seconds: float
    busy: tuple[int, ...] = ()

    @property
    def is_busy(self) -> bool:
        return self.status in _BUSY

    @property
    def is_refusal(self) -> bool:
        return 400 <= self.status < 500 and not self.is_busy

    @property
    def retry_after_s(self) -> float | None:
        """How long the server asks to wait; None if it does not say, or gives a date, as servers of images do not."""
        try:
            value = float(self.headers.get("retry-after", ""))
        except ValueError:
            return None
        return value if 0 <= value < math.inf else None

    @property
    def message(self) -> str:
        """The message of an error as OpenAI writes it, or the beginning of the answer."""
        if 300 <= self.status < 400 and (address := self.headers.get("location")):
            return f"it redirects to {plain(address)[:200]}; give that address if it is the right one"
        try:
            text = error_in(parse_json(self.content[:100_000]))
        except ValueError:
            text = None
        return " ".join(plain(text or self.content[:2000].decode("utf-8", "replace")).split())[:300]

    @property
    def complaint(self) -> str:
        return f"HTTP {self.status}" + (f": {self.message}" if self.message else "")


@dataclass(frozen=True)
class HttpServer:
    """A server that is asked over HTTP.

    Attributes:
        key: that requests bear; it is in no output.
        uses_proxy: whether requests to other hosts go by the proxy that the environment names.
    """

    url: str
    timeout_s: float = 600.0
    key: str | None = field(default=None, repr=False)
    uses_proxy: bool = False

    def client(self) -> httpx2.AsyncClient:
        parts = urlsplit(self.url)
        headers = {
            "Accept": "application/json, image/*",
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        return httpx2.AsyncClient(
            headers=headers,
            verify=_tls() if parts.scheme == "https" else False,
            trust_env=self.uses_proxy and parts.hostname not in _HERE,
            timeout=None,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def exchange(
        self, client: httpx2.AsyncClient, path: str, body: bytes | None, timeout_s: float | None = None
    ) -> HttpAnswer:
        """Send a request to a path, or an address on the same host: a POST if there is a body. Return the answer."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        address = path if "://" in path else f"{self.url}{path}"
        headers = {} if body is None else {"Content-Type": "application/json"}
        began = time.perf_counter()
        try:
            async with (
                asyncio.timeout(limit_s),
                client.stream(
                    "GET" if body is None else "POST", address, content=body, headers=headers
                ) as reply,
            ):
                content = bytearray()
                async for piece in reply.aiter_raw():
                    content += piece
                    if len(content) > MAX_ANSWER_BYTES:
                        raise NoAnswer(
                            "broken answer", f"the answer has more than {MAX_ANSWER_BYTES:,} bytes"
                        )
        except TimeoutError:
            raise NoAnswer("timeout", f"no answer within {limit_s:g} s; give a larger --timeout") from None
        except httpx2.ConnectError as error:
            raise _no_connection(error) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise NoAnswer("broken answer", f"the connection broke ({plain(reason)[:200]})") from None
        return HttpAnswer(reply.status_code, bytes(content), dict(reply.headers), time.perf_counter() - began)

    def send(self, path: str, body: dict[str, Any] | None, timeout_s: float | None = None) -> HttpAnswer:
        """Send one request and wait; see `exchange`."""

        async def send() -> HttpAnswer:
            async with self.client() as client:
                data = None if body is None else json.dumps(body).encode()
                return await self.exchange(client, path, data, timeout_s)

        return run_async(send())

    def send_patiently(
        self, path: str, body: dict[str, Any] | None, sleep: Callable[[float], None] = time.sleep
    ) -> HttpAnswer:
        """Send one request, again while the server is busy: after the time that it asks for, and later each time."""
        busy: tuple[int, ...] = ()
        answer = self.send(path, body)
        while answer.is_busy and len(busy) + 1 < _MOST_TRIES:
            growing_s = FIRST_WAIT_S * 2 ** len(busy)
            asked_s = answer.retry_after_s
            sleep(min(_LONGEST_WAIT_S, growing_s if asked_s is None else max(asked_s, growing_s / 5)))
            busy = (*busy, answer.status)
            answer = self.send(path, body)
        return replace(answer, busy=busy)


class ImagesEndpoint(HttpServer):
    """An OpenAI images endpoint. `url` ends before `/images/generations`."""

    def own_address(self, address: str) -> str:
        whole = urljoin(f"{self.url}{IMAGES}", address)
        if not has_same_host(whole, self.url):
            raise NoAnswer(
                "image on another server",
                f"an image is at {plain(whole)[:200]}, another host, from which nothing is fetched; let the server "
                "answer with b64_json",
            )
        return whole

    def model_entry(self, name: str | None, model_option: str, key_option: str) -> dict[str, Any]:
        """Return the server's description of a model, by default of the only one; empty if it lists none.

        It is asked before anything is drawn, so that an unreachable server costs no time.

        Args:
            model_option, key_option: how users name a model and give a key.
        """
        try:
            answer = self.send(MODELS, None, min(_ASK_S, self.timeout_s))
        except NoAnswer as error:
            raise Unsupported(f"{self.url}: {error}") from None
        if answer.status in (401, 403):
            raise Unsupported(f"{self.url} needs a key (HTTP {answer.status}); give {key_option} FILE")
        entries = list(_entries(answer)) if answer.status == 200 else []
        if name is None and len(entries) > 1:
            names = ", ".join(plain(entry["id"])[:100] for entry in entries[:10])
            raise UsageError(f"{self.url} has {len(entries)} models; give {model_option}, one of {names}")
        return next((entry for entry in entries if name in (None, entry["id"])), {})


def body_of(
    prompt: str, seed: int, fields: Mapping[str, Any], size: str | None, n: int = 1
) -> dict[str, Any]:
    """Return the JSON of a request for images, in base64."""
    body = dict(fields) | {"prompt": prompt, "n": n, "seed": seed, "response_format": "b64_json"}
    return body if size is None else body | {"size": size}


def images_in(reply: Any) -> list[bytes | str]:
    """Return the images of an answer's JSON: their files, or addresses."""
    data = reply.get("data") if isinstance(reply, dict) else None
    if not isinstance(data, list) or not data:
        says = error_in(reply)
        raise ValueError(
            f"it says {plain(says)[:200]!r}" if says else 'there is no list "data" with images in it'
        )
    return [_image_in(entry if isinstance(entry, dict) else {}) for entry in data]


def _image_in(entry: dict[str, Any]) -> bytes | str:
    texts = (entry[name] for name in ("b64_json", "url") if isinstance(entry.get(name), str))
    text: str | None = next(texts, None)
    if text is None:
        raise ValueError("an entry has neither b64_json nor url")
    if text.startswith("data:"):
        text = text.partition(",")[2]
    elif "b64_json" not in entry or text != entry["b64_json"]:
        return text
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError("b64_json is not base64") from None


def error_in(reply: Any) -> str | None:
    error = reply.get("error", reply.get("detail")) if isinstance(reply, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message[:2000] if isinstance(message, str) and message else None


def has_same_host(url: str, other: str) -> bool:
    a, b = urlsplit(url), urlsplit(other)
    return (a.scheme, a.hostname, a.port) == (b.scheme, b.hostname, b.port)


def split_endpoint(text: str, form: str) -> tuple[str, str]:
    """Return the address of an endpoint, without the route, and its query; `form` says in errors what to give."""
    text = text.strip()
    try:
        parts = urlsplit(text)
        is_complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, is_complete = SplitResult("", "", "", "", ""), False
    if parts.username is not None:
        raise UsageError(
            "an address has a user or a password in it, which requests and pages would show; leave them out, and give "
            f"a key in a file: {form}"
        )
    if not is_complete or parts.fragment or not text.isascii() or any(ord(letter) <= 32 for letter in text):
        raise UsageError(f"{plain(text[:200])}: give {form}")
    path = parts.path.rstrip("/").removesuffix(IMAGES)
    return urlunsplit((parts.scheme, parts.netloc, path, "", "")), parts.query


def json_or_text(text: str) -> Any:
    """Return a field's value: JSON where it is that (4, true, {"scale": 1}), else text."""
    try:
        return parse_json(text)
    except ValueError:
        return text


def run_async(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine to its end; beside the loop that a notebook has."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def _entries(answer: HttpAnswer) -> Iterator[dict[str, Any]]:
    reply = json_or_text(answer.content.decode("utf-8", "replace"))
    data = reply.get("data") if isinstance(reply, dict) else None
    for entry in data if isinstance(data, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("id"), str):
            yield entry


def _no_connection(error: httpx2.ConnectError) -> NoAnswer:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return NoAnswer("no connection", f"no connection ({plain(str(error))[:200]}); is the server running?")
    why = getattr(cause, "verify_message", "") or cause.reason or cause
    return NoAnswer(
        "no connection",
        f"no secure connection ({why}); for a certificate of your own, name it: SSL_CERT_FILE=CERTIFICATE.pem vivace "
        "...",
    )


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
