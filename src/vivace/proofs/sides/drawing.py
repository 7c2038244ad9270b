"""The shared part of all sources of images: one image for a prompt, a seed and settings."""

from __future__ import annotations

import io
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol

NOT_AN_IMAGE = "it is not an image"
"""Beginning of the reason why bytes are refused."""


class DrawingFailed(Exception):
    """One image could not be drawn; the message says why. The others continue.

    Args:
        request: the request, to be repeated by hand.
    """

    def __init__(self, reason: str, request: str = "") -> None:
        super().__init__(reason)
        self.request = request


@dataclass(frozen=True)
class Settings:
    """How an image is drawn. None leaves a value to the source."""

    height: int | None = None
    width: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None

    @property
    def call(self) -> dict[str, Any]:
        """The settings that have a value."""
        values = {name: getattr(self, name) for name in SETTINGS}
        return {name: value for name, value in values.items() if value is not None}

    def filled(self, defaults: dict[str, Any]) -> Settings:
        """Return the settings with defaults in the place of None."""
        return replace(self, **{name: defaults.get(name) for name in SETTINGS if getattr(self, name) is None})


SETTINGS = ("height", "width", "num_inference_steps", "guidance_scale")


@dataclass(frozen=True)
class DrawnImage:
    """An image file as received.

    Attributes:
        settings: how it was drawn, as far as the source says; None if as it was asked for.
        faults: faults that the file no longer shows, e.g. "not finite".
        notes: remarks on its delivery, e.g. that a server was busy before.
    """

    content: bytes
    suffix: str
    seconds: float | None = None
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    settings: dict[str, Any] | None = None


class Drawer(Protocol):
    """A source of images."""

    def draw(self, prompt: str, seed: int, settings: Settings) -> DrawnImage:
        """Return one image.

        Raises:
            DrawingFailed: there is no image.
        """
        ...

    def __enter__(self) -> Drawer: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True)
class DrawJob:
    """An image to draw. `repeat` tells the same image, drawn again, from the first."""

    prompt: str
    seed: int
    settings: Settings = field(default_factory=Settings)
    repeat: int = 0


def as_png(image: Any) -> bytes:
    """Return a PIL image as a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def suffix_of(content: bytes) -> str:
    """Return the suffix of an image file by its first bytes.

    Raises:
        DrawingFailed: it is not a readable image.
    """
    if content.startswith(b"\x89PNG"):
        return ".png"
    if content.startswith(b"\xff\xd8"):
        return ".jpg"
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return ".webp"
    if content.startswith((b"II*\0", b"MM\0*")):
        return ".tif"
    if content.startswith(b"BM"):
        return ".bmp"
    raise DrawingFailed(
        f"{NOT_AN_IMAGE}: it begins with {content[:16]!r}; PNG, JPEG, WebP, BMP and TIFF are read"
    )
