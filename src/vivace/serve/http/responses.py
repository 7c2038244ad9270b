"""Images and errors as the OpenAI images API has them."""

from __future__ import annotations

import asyncio
import base64
import functools
import io
import json
import os
import secrets
import time
import zlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from vivace.foundation.spec.sizes import Size
from vivace.serve.queue.jobs import Drawn, JobError

MIME = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
_OPTIONS: dict[str, dict[str, int]] = {
    "png": {"compress_level": 1, "compress_type": zlib.Z_RLE},
    "jpeg": {"quality": 92},
    "webp": {"quality": 90, "method": 0},
}
"""Encoders' quickest options without larger files (results/encoding-cpu.json). In photographs only runs save."""
KEPT_S = 3600.0
"""Seconds for which an image is fetched by its URL."""
KEPT_BYTES = 256_000_000
_ENCODERS = ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2), thread_name_prefix="encode")
"""Several GPUs draw images faster than two cores encode them."""


@dataclass(frozen=True)
class EncodedImage:
    """An image as a file, also in base64 where somebody needs it, and the seconds that encoding took."""

    data: bytes
    mime: str
    seconds: float
    b64: bytes = b""


async def encode(
    drawn: Drawn, format_: str, quality: int | None, size: Size | None = None, *, b64: bool = False
) -> EncodedImage:
    """Encode an image beside the event loop, a partial one enlarged to a size, and its data in base64, too."""
    return await asyncio.get_running_loop().run_in_executor(
        _ENCODERS, functools.partial(encode_now, drawn, format_, quality, size, b64=b64)
    )


def encode_now(
    drawn: Drawn, format_: str, quality: int | None = None, size: Size | None = None, *, b64: bool = False
) -> EncodedImage:
    import PIL.Image

    began = time.perf_counter()
    image = PIL.Image.frombytes("RGB", (drawn.width, drawn.height), drawn.pixels)
    if size is not None and size != image.size:
        image = image.resize(size, PIL.Image.Resampling.BICUBIC)
    file = io.BytesIO()
    options = (
        _OPTIONS[format_] if quality is None or format_ == "png" else _OPTIONS[format_] | {"quality": quality}
    )
    image.save(file, format_.upper(), **options)
    data = file.getvalue()
    text = base64.b64encode(data) if b64 else b""
    return EncodedImage(data, MIME[format_], time.perf_counter() - began, text)


def dumped(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def with_image(fields: dict[str, Any], b64: bytes) -> bytes:
    """Return the JSON of an object with an image. The megabytes of an image need no look for what JSON escapes."""
    return dumped(fields)[:-1] + b',"b64_json":"' + b64 + b'"}'


def with_list(fields: dict[str, Any], name: str, entries: list[bytes]) -> bytes:
    """Return the JSON of an object with a list of what is JSON already."""
    return dumped(fields)[:-1] + f',"{name}":['.encode() + b",".join(entries) + b"]}"


class RequestError(JobError):
    """A request that cannot be served, by its wrong field."""

    def __init__(self, field_: str | None, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(status, message, field_, code)


_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


def error_body(
    status: int, message: str, field_: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the body of an error, whose code is OpenAI's name of it, or else the status."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = code or _CODES.get(status, str(status))
    return {"error": {"message": message, "type": kind, "param": field_, "code": code}}


KEEP_ALIVE = b": keep-alive\n\n"
"""A comment of an event stream: proxies end one in which nothing comes for a minute."""
NO_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
    "output_tokens": 0,
    "total_tokens": 0,
}
"""Clients' types require it in events; nothing is billed here, and no token is counted."""


def event_text(kind: str, fields: dict[str, Any], b64: bytes | None = None) -> bytes:
    """Return a server-sent event, of an image if there is one."""
    fields = {"type": kind, **fields}
    data = dumped(fields) if b64 is None else with_image(fields, b64)
    return f"event: {kind}\ndata: ".encode() + data + b"\n\n"


def server_timing(phases: dict[str, float]) -> str:
    return ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in phases.items())


@dataclass
class KeptImages:
    """Images that are fetched by URL, in memory: for an hour and up to 256 MB; the oldest go first."""

    num_bytes: int = 0
    _images: OrderedDict[str, tuple[float, EncodedImage]] = field(default_factory=OrderedDict)
    """Each with the time when it is removed, by `time.monotonic()`, which no change of the clock moves."""

    def keep(self, encoded: EncodedImage) -> str:
        """Keep an image and return its name, which cannot be guessed."""
        name = secrets.token_urlsafe(24)
        self._images[name] = time.monotonic() + KEPT_S, encoded
        self.num_bytes += len(encoded.data)
        self.remove_old()
        return name

    def get(self, name: str) -> EncodedImage | None:
        self.remove_old()
        return self._images.get(name, (0.0, None))[1]

    def remove_old(self) -> None:
        """Remove images whose hour has passed, and those that are too many; called now and then."""
        now = time.monotonic()
        while self._images and (self.num_bytes > KEPT_BYTES or next(iter(self._images.values()))[0] <= now):
            _, (_, encoded) = self._images.popitem(last=False)
            self.num_bytes -= len(encoded.data)
