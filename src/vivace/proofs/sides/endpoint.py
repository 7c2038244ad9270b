"""An OpenAI images endpoint as a source of images: POST /images/generations.

Servers of diffusion models (sglang, vllm-omni, vivace) take fields beyond OpenAI's: `seed`, `num_inference_steps` and
`guidance_scale`. Images are asked for as base64. An image that comes as a URL is fetched only from the server itself.
"""

from __future__ import annotations

import base64
import binascii
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any
from urllib.parse import urljoin

from vivace.errors import Unsupported, UsageError
from vivace.foundation.untrusted.files import parse_json
from vivace.foundation.untrusted.terminal_text import plain
from vivace.proofs.http import HttpAnswer, NoAnswer, NoConnection, has_same_host, send, send_patiently
from vivace.proofs.sides.drawing import NOT_AN_IMAGE, DrawingFailed, DrawnImage, Settings, suffix_of
from vivace.proofs.sides.sides import EndpointSide

_NOT_THE_ANSWER = "the answer is not that of an images endpoint"
NO_IMAGES = (_NOT_THE_ANSWER, NOT_AN_IMAGE, "asked for 1 image")
"""Beginnings of reasons why an answer of status 200 is not one image."""


class _OfAnotherHost(ValueError):
    """An image is where nothing is fetched from."""


@dataclass(frozen=True)
class ServedImages:
    """The images of one answer.

    Attributes:
        notes: what was remarkable about the answer.
        says: its other fields, and those of its first image.
    """

    contents: tuple[bytes, ...]
    seconds: float
    notes: tuple[str, ...]
    says: Mapping[str, Any] = field(default_factory=dict)


class Endpoint:
    """An images endpoint.

    Args:
        key: sent with requests; it appears in no output.
    """

    def __init__(self, side: EndpointSide, timeout_s: float = 600.0, key: str | None = None) -> None:
        self.url = f"{side.url}/images/generations"
        self._timeout_s, self._key = timeout_s, key
        self._fields = dict(side.fields)

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def body(self, prompt: str, seed: int, settings: Settings, n: int = 1, **fields: Any) -> dict[str, Any]:
        """Return the JSON of a request.

        Args:
            n: number of images.
            fields: replace those of the same name, or are added.
        """
        call = settings.call
        body: dict[str, Any] = self._fields | {
            "prompt": prompt,
            "n": n,
            "seed": seed,
            "response_format": "b64_json",
        }
        if "width" in call and "height" in call:
            body["size"] = f"{call['width']}x{call['height']}"
        for name in ("num_inference_steps", "guidance_scale"):
            if name in call:
                body[name] = call[name]
        return body | fields

    def curl(self, body: dict[str, Any]) -> str:
        """Return a request as a command line."""
        text = json.dumps(body, ensure_ascii=False)
        bearer = "" if self._key is None else ' -H "Authorization: Bearer $KEY"'
        return (
            f"curl {shlex.quote(self.url)}{bearer} -H 'Content-Type: application/json' -d {shlex.quote(text)}"
        )

    def draw(self, prompt: str, seed: int, settings: Settings) -> DrawnImage:
        """Return one image; see `Drawer.draw`."""
        body = self.body(prompt, seed, settings)
        images = self.images(body)
        if len(images.contents) != 1:
            raise DrawingFailed(f"asked for 1 image, got {len(images.contents)}", self.curl(body))
        content = images.contents[0]
        suffix = suffix_of(content)
        notes = images.notes
        if suffix != ".png":
            notes = (*notes, f"images come as {suffix[1:].upper()}, which may be lossy")
        return DrawnImage(content, suffix, images.seconds, notes=notes)

    def images(self, body: dict[str, Any]) -> ServedImages:
        """Send a request and return its images.

        Raises:
            DrawingFailed: there is no answer, a refusal, or an answer without images.
        """
        try:
            answer = send_patiently(self.url, body, self._timeout_s, self._key)
            if answer.status != 200:
                raise DrawingFailed(answer.complaint, self.curl(body))
            reply = parse_json(answer.content)
            contents, notes = self._contents(reply)
        except NoAnswer as error:
            raise DrawingFailed(str(error), self.curl(body)) from None
        except _OfAnotherHost as error:
            raise DrawingFailed(str(error), self.curl(body)) from None
        except ValueError as error:
            raise DrawingFailed(f"{_NOT_THE_ANSWER}: {error}", self.curl(body)) from None
        if answer.busy:
            notes = (*notes, f"the server was busy (HTTP {answer.busy[-1]}) and was asked again")
        first = reply["data"][0]
        says = {name: value for name, value in (reply | first).items() if isinstance(value, str | int)}
        return ServedImages(contents, answer.seconds, notes, says)

    def ask(self, body: dict[str, Any]) -> HttpAnswer:
        """Send a request and return any answer.

        Raises:
            NoAnswer: there is none.
        """
        return send_patiently(self.url, body, self._timeout_s, self._key)

    def cancelled(self, body: dict[str, Any], after_s: float) -> bool:
        """Send a request and hang up after some seconds; return whether that was before the answer."""
        try:
            send(self.url, body, after_s, self._key)
        except NoAnswer:
            return True
        return False

    def _contents(self, reply: Any) -> tuple[tuple[bytes, ...], tuple[str, ...]]:
        """Return the images of an answer's JSON, and remarks on it.

        Raises:
            ValueError, NoAnswer: there are none.
        """
        data = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(data, list) or not data:
            raise ValueError(_without_images(reply) or 'there is no list "data" with images in it')
        contents, notes = [], []
        for entry in data:
            entry = entry if isinstance(entry, dict) else {}
            if isinstance(entry.get("b64_json"), str):
                contents.append(_decoded(entry["b64_json"]))
            elif isinstance(entry.get("url"), str):
                contents.append(self._fetched(entry["url"]))
                notes.append("images come as addresses (url), though b64_json was asked for")
            else:
                raise ValueError("an entry has neither b64_json nor url")
        return tuple(contents), tuple(dict.fromkeys(notes))

    def _fetched(self, address: str) -> bytes:
        if address.startswith("data:"):
            return _decoded(address.partition(",")[2])
        url = urljoin(self.url, address)
        if not has_same_host(url, self.url):
            raise _OfAnotherHost(
                f"an image is at {plain(url)[:200]}, another host, from which nothing is fetched; let the server "
                "answer with b64_json"
            )
        answer = send(url, None, self._timeout_s, self._key)
        if answer.status != 200:
            raise ValueError(f"the image at {plain(url)[:200]} is not there ({answer.complaint[:100]})")
        return answer.content


def _without_images(reply: Any) -> str | None:
    """Return what an answer without images says of an error; None if it does not."""
    error = reply.get("error", reply.get("detail")) if isinstance(reply, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return f"it says {plain(message)[:200]!r}" if isinstance(message, str) and message else None


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("b64_json is not base64") from None


def with_model(side: EndpointSide, timeout_s: float = 30.0, key: str | None = None) -> EndpointSide:
    """Return an endpoint with the name of its model: the configured one, else the only one that the server lists.

    The server is queried before anything is drawn, so that an unreachable server costs no time.

    Raises:
        Unsupported: the server does not answer.
        UsageError: it lists several models.
    """
    if "model" in side.fields:
        return side
    try:
        answer = send(f"{side.url}/models", None, timeout_s, key)
        reply = parse_json(answer.content) if answer.status == 200 else None
    except NoConnection as error:
        raise Unsupported(f"{side.url}: {error}") from None
    except (NoAnswer, ValueError):
        return side
    data = reply.get("data") if isinstance(reply, dict) else None
    names = _names(data if isinstance(data, list) else [])
    if len(names) > 1:
        raise UsageError(
            f"{side.url} has {len(names)} models; name one: {side.url}?model=NAME, NAME is one of "
            + ", ".join(plain(name)[:100] for name in names[:10])
        )
    return replace(side, fields=side.fields | {"model": names[0]}) if names else side


def _names(data: Sequence[Any]) -> list[str]:
    return [entry["id"] for entry in data if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
