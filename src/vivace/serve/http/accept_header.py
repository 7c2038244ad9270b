"""What a client wants to get, by its Accept header: JSON and events, or the bytes of an image."""

from __future__ import annotations

from vivace.serve.http.requests import ImageBody
from vivace.serve.http.responses import MIME, RequestError
from vivace.serve.queue.jobs import JobError

_JSON = ("application/json", "application/*", "*/*")
_EVENTS = ("text/event-stream", "text/*")
_OTHERS = "image/"
_ANY = "image/*"


def accepted_format(header: str, body: ImageBody) -> str | None:
    """Return the format whose bytes a client prefers; None for JSON or events.

    Many clients list types that they do not need, e.g. text/html. They get JSON unless all listed types are images.

    Args:
        header: of the request; empty for none.
        body: whose format is that for "image/*".

    Raises:
        JobError: only images of other types are accepted, or it conflicts with the rest of the request.
    """
    weights = sorted(_weights(header), key=lambda each: -each[1])
    formats = {mime: name for name, mime in MIME.items()} | {_ANY: body.output_format}
    for kind, _ in weights:
        if kind in formats:
            _check_alone(header, body, formats[kind])
            return formats[kind]
        if kind in _JSON or kind in _EVENTS:
            return None
    if weights and all(kind.startswith(_OTHERS) for kind, _ in weights):
        types = ", ".join(MIME.values())
        raise JobError(406, f"Accept: {header[:100]} has none of the types that this server sends: {types}")
    return None


def _check_alone(header: str, body: ImageBody, format_: str) -> None:
    if body.n > 1 or body.stream or body.response_format == "url":
        raise RequestError(
            None,
            f"Accept: {header[:100]} asks for the bytes of one image; leave n, stream and response_format out",
        )
    if format_ == "png" and body.output_compression not in (None, 100):
        raise RequestError("output_compression", "png is not compressed with loss; accept jpeg or webp")


def _weights(header: str) -> list[tuple[str, float]]:
    """Return the types of a header and their weights, without those that are refused by a weight of 0."""
    weights = []
    for part in header.lower().split(","):
        kind, *parameters = (text.strip() for text in part.split(";"))
        weight = next((text[2:] for text in parameters if text.startswith("q=")), "1")
        try:
            each = float(weight)
        except ValueError:
            each = 1.0
        if kind and each > 0:
            weights.append((kind, each))
    return weights
