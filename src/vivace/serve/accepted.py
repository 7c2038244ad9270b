"""The Accept header: whether a client requests the bytes of an image, and their format."""

from __future__ import annotations

from vivace.serve.responses import MIME

_JSON = ("application/json", "application/*", "*/*")
_EVENTS = ("text/event-stream", "text/*")
_OTHERS = "image/"
_ANY = "image/*"


def accepted_format(header: str, format_: str) -> str | None:
    """Return the format whose bytes a client prefers; None for JSON or events.

    Many clients list types that they do not need, e.g. text/html. They get JSON unless all listed types are images.

    Args:
        header: of the request; empty for none.
        format_: for "image/*".

    Raises:
        ValueError: only images of other types are accepted.
    """
    weights = sorted(_weights(header), key=lambda each: -each[1])
    formats = {mime: name for name, mime in MIME.items()} | {_ANY: format_}
    for kind, _ in weights:
        if kind in formats:
            return formats[kind]
        if kind in _JSON or kind in _EVENTS:
            return None
    if weights and all(kind.startswith(_OTHERS) for kind, _ in weights):
        raise ValueError(
            f"Accept: {header[:100]} has none of the types that this server sends: {', '.join(MIME.values())}"
        )
    return None


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
