"""Requests to an images endpoint under load: the body of each, and what became of it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import random
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2
from PIL import Image

from vivace.benchmark.load_testing.images_endpoint import (
    IMAGES,
    ImagesEndpoint,
    NoAnswer,
    body_of,
    images_in,
    json_or_text,
    split_endpoint,
)
from vivace.benchmark.load_testing.load_rows import DONE, RequestSettings
from vivace.errors import UsageError
from vivace.foundation.untrusted.files import parse_json, reading
from vivace.foundation.untrusted.image_files import FORMATS, MAX_PIXELS
from vivace.foundation.untrusted.streams import plain

_MAX_SEED = 2**31 - 1
_OWN_FIELDS = ("prompt", "seed", "n", "size", "model", "response_format", "stream", "loras")
_MAX_ENTRY = 4000
"""Characters kept of a server's description of its model."""
_PHASE = re.compile(r"([A-Za-z][\w-]*)\s*;[^,]*?dur=([0-9.]+)")
_MAX_PHASES = 20
_MAX_SHORT = 1 << 16
"""Bytes of an answer that is parsed at once: one with the address of an image is not longer."""
_CHECKS = ThreadPoolExecutor(2, thread_name_prefix="answers")
"""Decode images beside the event loop, which has other requests to time."""


@dataclass(frozen=True)
class Variant:
    """Differences between requests other than the prompt and the seed."""

    size: str | None = None
    lora: str | None = None


@dataclass(frozen=True)
class LoadTarget:
    """A server and the requests to send to it.

    Attributes:
        model: None for a server that lists none.
        fields: of every request.
        without: fields that requests would have, and this server does not know.
        variants: one of which each request has at random.
        entry: the server's description of the model.
        seen: the bodies of requests by the sha256 of the images that they brought.
    """

    endpoint: ImagesEndpoint
    model: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    prompts: tuple[str, ...] = ()
    variants: tuple[Variant, ...] = (Variant(),)
    without: frozenset[str] = frozenset()
    entry: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, bytes] = field(default_factory=dict, repr=False, compare=False)

    def request(self, number: int, order: random.Random, *, cycles: bool) -> tuple[int, bytes]:
        """Return the variant, in turn or at random, and the body of a request. Each request has another seed."""
        place = number % len(self.variants) if cycles else order.randrange(len(self.variants))
        variant = self.variants[place]
        prompt, seed = self.prompts[number % len(self.prompts)], order.randrange(_MAX_SEED)
        body = body_of(prompt, seed, self.fields, variant.size)
        if self.model is not None:
            body["model"] = self.model
        if variant.lora is not None:
            body["loras"] = [{"name": variant.lora}]
        return place, json.dumps({name: body[name] for name in body if name not in self.without}).encode()

    @property
    def settings(self) -> RequestSettings:
        """The settings of the requests, as rows keep them."""
        return RequestSettings(
            model=self.model,
            fields=self.fields,
            variants=tuple((variant.size, variant.lora) for variant in self.variants),
            prompts_sha256=hashlib.sha256("\n".join(self.prompts).encode()).hexdigest(),
            without=tuple(sorted(self.without)),
        )

    def find_model(self) -> LoadTarget:
        """Return the target with the model that the server lists, and the server's description of it."""
        entry = self.endpoint.model_entry(self.model, "--model", "--api-key-file")
        name = entry.get("id", self.model)
        kept = entry if len(json.dumps(entry)) <= _MAX_ENTRY else {"id": name}
        return replace(self, model=name, entry=kept)


def server_url(text: str) -> str:
    url, query = split_endpoint(text, "--endpoint http://HOST:PORT/v1, --api-key-file FILE")
    if query:
        raise UsageError(
            f"--endpoint {text[:200]}: give http://HOST:PORT/v1, and fields with --field NAME=VALUE"
        )
    return url


def parse_fields(texts: Sequence[str]) -> dict[str, Any]:
    """Return further fields of each request, written NAME=VALUE, where VALUE may be JSON."""
    fields: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise UsageError(f"--field {text[:200]}: give NAME=VALUE, e.g. output_format=webp")
        if name in _OWN_FIELDS or name in fields:
            why = "is set for each request" if name in _OWN_FIELDS else "is there twice"
            raise UsageError(f"--field {text[:200]}: {name} {why}; leave it out")
        fields[name] = json_or_text(value)
    return fields


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
    phases_ms: dict[str, float] = field(default_factory=dict)
    message: str = ""
    retry_after_s: float | None = None
    status: int | None = None
    check: asyncio.Future[str] | None = field(default=None, compare=False)

    async def checked(self) -> str:
        return self.kind if self.check is None else await self.check


async def send(target: LoadTarget, client: httpx2.AsyncClient, body: bytes) -> RequestOutcome:
    """Send a request and return its outcome; no failure of the server raises."""
    try:
        answer = await target.endpoint.exchange(client, IMAGES, body)
        phases = phases_of(answer.headers.get("server-timing", ""))
        if answer.status == 200 and (address := _address_in(answer.content)) is not None:
            answer = await target.endpoint.exchange(client, target.endpoint.own_address(address), None)
    except NoAnswer as error:
        return RequestOutcome(error.kind, time.perf_counter(), message=plain(str(error))[:300])
    ended, status = time.perf_counter(), answer.status
    if status != 200:
        return RequestOutcome(f"HTTP {status}", ended, {}, answer.message, answer.retry_after_s, status)
    check = asyncio.get_running_loop().run_in_executor(_CHECKS, fault_of, target, body, answer.content)
    return RequestOutcome(DONE, ended, phases, status=status, check=check)


def _address_in(content: bytes) -> str | None:
    """Return the address of an answer's image; None where the image is in the answer, or there is none."""
    if len(content) > _MAX_SHORT:
        return None
    try:
        return next((image for image in images_in(parse_json(content)) if isinstance(image, str)), None)
    except ValueError:
        return None


def fault_of(target: LoadTarget, body: bytes, content: bytes) -> str:
    """Decode an answer; return "done", or what is wrong with it, as it is counted.

    It is one image, whole, of the size and the format that were asked for, and no other request has had it.

    Args:
        content: JSON with the image in base64, or the image's file.
    """
    asked: dict[str, Any] = parse_json(body)
    try:
        images = images_in(parse_json(content)) if content[:1] in b"{[" else [content]
    except ValueError:
        return "no image"
    if len(images) != 1 or not isinstance(images[0], bytes):
        return f"{len(images)} images"
    try:
        with reading("the answer", UsageError), Image.open(io.BytesIO(images[0]), formats=FORMATS) as picture:
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
    same = target.seen.setdefault(hashlib.sha256(images[0]).hexdigest(), body)
    return DONE if same == body else "same image for another seed or prompt"


def phases_of(header: str) -> dict[str, float]:
    phases: dict[str, float] = {}
    for name, text in _PHASE.findall(header[:4000])[:_MAX_PHASES]:
        if text.count(".") <= 1 and text != ".":
            phases[name] = float(text)
    return phases
