"""An OpenAI images endpoint as a side of a proof.

Servers of diffusion models (sglang, vllm-omni, vivace) take fields beyond OpenAI's: `seed`, `num_inference_steps` and
`guidance_scale`. Images are asked for as base64. An image that comes as a URL is fetched only from the server itself.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qsl

from vivace.benchmark.load_testing.images_endpoint import (
    IMAGES,
    HttpAnswer,
    ImagesEndpoint,
    NoAnswer,
    body_of,
    images_in,
    json_or_text,
    split_endpoint,
)
from vivace.errors import UsageError
from vivace.foundation.untrusted.files import parse_json
from vivace.proofs.sides.side import (
    NOT_AN_IMAGE,
    SETTINGS,
    DrawingFailure,
    DrawJob,
    DrawnImage,
    Side,
    suffix_of,
)

_FORM = (
    "http://HOST:PORT/v1, optionally with ?model=NAME&FIELD=VALUE; a key with --key-a FILE or --key-b FILE"
)
_NOT_THE_ANSWER = "the answer is not that of an images endpoint"
NO_IMAGES = (_NOT_THE_ANSWER, NOT_AN_IMAGE, "asked for 1 image")
"""Beginnings of reasons why an answer of status 200 is not one image."""
_SECRET = re.compile(r"(?i)(^|[_-])(key|apikey|token|secret|password|authorization)$")
_OWN_FIELDS = ("prompt", "seed", "n", "size", "num_inference_steps", "guidance_scale", "response_format")


@dataclass(frozen=True)
class ServedImages:
    """The images of one answer, with remarks on it, its other fields, and those of its first image."""

    contents: tuple[bytes, ...]
    seconds: float
    notes: tuple[str, ...]
    says: dict[str, Any]


@dataclass(frozen=True)
class EndpointSide(Side):
    """http://HOST:PORT/v1?model=NAME; further values of the query are fields of each request."""

    text: str
    server: ImagesEndpoint
    fields: dict[str, Any] = field(default_factory=dict)
    probed = SETTINGS

    @staticmethod
    def is_written(text: str) -> bool:
        return text.lower().startswith(("http://", "https://"))

    @classmethod
    def parse(cls, text: str) -> EndpointSide:
        url, query = split_endpoint(text, _FORM)
        fields: dict[str, Any] = {}
        for name, value in parse_qsl(query, keep_blank_values=True):
            if _SECRET.search(name):
                raise UsageError(
                    f"the field {name[:40]} looks like a secret, which every request and the page would show; give a "
                    "key with --key-a FILE or --key-b FILE"
                )
            if name in _OWN_FIELDS or name in fields:
                why = "is set by vivace" if name in _OWN_FIELDS else "is there twice"
                raise UsageError(
                    f"{text[:200]}: the field {name} {why}; leave it out, and use vivace's own options"
                )
            fields[name] = json_or_text(value) if name != "model" else value
        return cls(text, ImagesEndpoint(url, uses_proxy=True), fields)

    def connect(self, timeout_s: float, key: str | None) -> EndpointSide:
        """Return the side with the model that the server lists, where none is named; see `model_entry`."""
        server, fields = replace(self.server, timeout_s=timeout_s, key=key), self.fields
        if "model" not in fields:
            entry = server.model_entry(None, "?model=NAME", "--key-a FILE or --key-b")
            fields = fields | ({"model": entry["id"]} if entry else {})
        return replace(self, server=server, fields=fields)

    def body(self, job: DrawJob, n: int = 1, **fields: Any) -> dict[str, Any]:
        """Return the JSON of a request for `n` images. `fields` replace those of the same name, or are added."""
        call = job.settings.call
        size = f"{call['width']}x{call['height']}" if {"width", "height"} <= call.keys() else None
        further = {name: call[name] for name in ("num_inference_steps", "guidance_scale") if name in call}
        return body_of(job.prompt, job.seed, self.fields | further, size, n) | fields

    def request_text(self, job: DrawJob) -> str:
        return self.curl(self.body(job))

    def curl(self, body: dict[str, Any]) -> str:
        url, text = f"{self.server.url}{IMAGES}", json.dumps(body, ensure_ascii=False)
        bearer = "" if self.server.key is None else ' -H "Authorization: Bearer $KEY"'
        return f"curl {shlex.quote(url)}{bearer} -H 'Content-Type: application/json' -d {shlex.quote(text)}"

    def draw(self, job: DrawJob) -> DrawnImage:
        body = self.body(job)
        images = self.images(body)
        if len(images.contents) != 1:
            raise DrawingFailure(f"asked for 1 image, got {len(images.contents)}", self.curl(body))
        suffix = suffix_of(images.contents[0])
        lossy = () if suffix == ".png" else (f"images come as {suffix[1:].upper()}, which may be lossy",)
        return DrawnImage(images.contents[0], suffix, images.seconds, notes=images.notes + lossy)

    def images(self, body: dict[str, Any]) -> ServedImages:
        try:
            answer = self.ask(body)
            if answer.status != 200:
                raise DrawingFailure(answer.complaint, self.curl(body))
            reply = parse_json(answer.content)
            images = images_in(reply)
            contents = tuple(image if isinstance(image, bytes) else self._fetch(image) for image in images)
        except NoAnswer as error:
            raise DrawingFailure(str(error), self.curl(body)) from None
        except ValueError as error:
            raise DrawingFailure(f"{_NOT_THE_ANSWER}: {error}", self.curl(body)) from None
        notes = []
        if any(isinstance(image, str) for image in images):
            notes.append("images come as addresses (url), though b64_json was asked for")
        if answer.busy:
            notes.append(f"the server was busy (HTTP {answer.busy[-1]}) and was asked again")
        says = {
            name: value for name, value in (reply | reply["data"][0]).items() if isinstance(value, str | int)
        }
        return ServedImages(contents, answer.seconds, tuple(notes), says)

    def ask(self, body: dict[str, Any]) -> HttpAnswer:
        return self.server.send_patiently(IMAGES, body)

    def hang_up(self, body: dict[str, Any], after_s: float) -> bool:
        """Send a request and hang up after some seconds; return whether that was before the answer."""
        try:
            self.server.send(IMAGES, body, after_s)
        except NoAnswer:
            return True
        return False

    def _fetch(self, address: str) -> bytes:
        answer = self.server.send(self.server.own_address(address), None)
        if answer.status != 200:
            raise ValueError(f"the image at {address[:200]!r} is not there ({answer.complaint[:100]})")
        return answer.content
