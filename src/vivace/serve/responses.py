"""Images and errors as the OpenAI images API has them."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import secrets
import time
import zlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from vivace.serve.jobs import Drawn
from vivace.spec.sizes import Size

MIME = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
_OPTIONS: dict[str, dict[str, int]] = {
    "png": {"compress_level": 1, "compress_type": zlib.Z_RLE},
    "jpeg": {"quality": 92},
    "webp": {"quality": 90, "method": 0},
}
"""Encoders' quickest options without larger files (results/encoding-cpu.json). In photographs only runs save."""
_KEPT_S = 3600.0
_KEPT_BYTES = 256_000_000
_ENCODERS = ThreadPoolExecutor(2, thread_name_prefix="encode")


@dataclass(frozen=True)
class EncodedImage:
    """An image as a file, and the seconds that encoding took."""

    data: bytes
    mime: str
    seconds: float

    @property
    def b64(self) -> str:
        return base64.b64encode(self.data).decode()


async def encode(drawn: Drawn, format_: str, quality: int | None, size: Size | None = None) -> EncodedImage:
    """Encode an image beside the event loop; Pillow lets other threads run meanwhile.

    Args:
        size: to enlarge a partial image to.
    """
    return await asyncio.get_running_loop().run_in_executor(
        _ENCODERS, encode_now, drawn, format_, quality, size
    )


def encode_now(
    drawn: Drawn, format_: str, quality: int | None = None, size: Size | None = None
) -> EncodedImage:
    """Encode an image in this thread; see `encode`."""
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
    return EncodedImage(file.getvalue(), MIME[format_], time.perf_counter() - began)


def error_body(status: int, message: str, field_: str | None = None) -> dict[str, Any]:
    """Return the body of an error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": field_, "code": str(status)}}


def event_text(kind: str, fields: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def server_timing(phases: dict[str, float]) -> str:
    """Return the header Server-Timing, in milliseconds."""
    return ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in phases.items())


@dataclass
class KeptImages:
    """Images that are fetched by URL, for an hour and up to 256 MB; the oldest go first."""

    _images: OrderedDict[str, tuple[float, EncodedImage]] = field(default_factory=OrderedDict)

    def keep(self, encoded: EncodedImage) -> str:
        """Keep an image and return its name, which cannot be guessed."""
        name = secrets.token_urlsafe(24)
        self._images[name] = time.monotonic() + _KEPT_S, encoded
        while self._images and (
            sum(len(each.data) for _, each in self._images.values()) > _KEPT_BYTES
            or next(iter(self._images.values()))[0] < time.monotonic()
        ):
            self._images.popitem(last=False)
        return name

    def get(self, name: str) -> EncodedImage | None:
        until, encoded = self._images.get(name, (0.0, None))
        return encoded if until > time.monotonic() else None
