"""What every kind of side has in common: it draws one image for a prompt, a seed and settings."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vivace.models.find import LocatedModel
    from vivace.proofs.sides.plan import ProofPlan

NOT_AN_IMAGE = "it is not an image"
"""Beginning of the reason why bytes are refused."""
SETTINGS = ("height", "width", "num_inference_steps", "guidance_scale")
_BEGINNINGS = {b"\x89PNG": ".png", b"\xff\xd8": ".jpg", b"II*\0": ".tif", b"MM\0*": ".tif", b"BM": ".bmp"}


class DrawingFailure(Exception):
    """One image could not be drawn; the message says why, `request` repeats it by hand. The others continue."""

    def __init__(self, reason: str, request: str = "") -> None:
        super().__init__(reason)
        self.request = request


@dataclass(frozen=True)
class ImageSettings:
    """How an image is drawn. None leaves a value to the side."""

    height: int | None = None
    width: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None

    @property
    def call(self) -> dict[str, Any]:
        return {name: value for name in SETTINGS if (value := getattr(self, name)) is not None}

    def filled(self, defaults: dict[str, Any]) -> ImageSettings:
        return replace(self, **{name: defaults.get(name) for name in SETTINGS if getattr(self, name) is None})


@dataclass(frozen=True)
class DrawnImage:
    """An image file as received.

    Attributes:
        settings: how it was drawn, as far as the side says; None if as it was asked for.
        faults: faults that the file no longer shows, e.g. "not finite".
        notes: remarks on its delivery, e.g. that a server was busy before.
    """

    content: bytes
    suffix: str
    seconds: float | None = None
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    settings: dict[str, Any] | None = None


@dataclass(frozen=True)
class DrawJob:
    """An image to draw. `repeat` tells the same image, drawn again, from the first."""

    prompt: str
    seed: int
    settings: ImageSettings = field(default_factory=ImageSettings)
    repeat: int = 0

    @property
    def label(self) -> str:
        return f"“{self.prompt[:60]}” seed {self.seed}"

    def with_(self, **settings: Any) -> DrawJob:
        return replace(self, settings=replace(self.settings, **settings))


Draw = Callable[[DrawJob], DrawnImage]
"""Draws one image, or raises DrawingFailure."""
OnRead = Callable[[], None]
"""Called when models are loaded."""
OnNote = Callable[[str], object]


class Side:
    """One side of a proof. A is the reference.

    Attributes:
        text: as the user wrote it.
        draws: whether it draws new images: repetitions, other settings.
        untimed: why the seconds of its images are unknown; "" if they are known.
        located: its model, if it is drawn here.
        probed: the settings that are changed to see whether it follows them; None for what is vivace's own.
    """

    text: str
    draws: bool = True
    untimed: str = ""
    located: LocatedModel | None = None
    probed: tuple[str, ...] | None = None

    @property
    def defaults(self) -> dict[str, Any]:
        """Its settings, where known, without what its recipe changes."""
        return {}

    @property
    def recipe_settings(self) -> dict[str, Any]:
        """The steps and the guidance that its recipe sets."""
        return {}

    @property
    def identity(self) -> str:
        """The key of its images in the store."""
        return self.text

    def request_text(self, job: DrawJob) -> str:
        """Return the request for an image, to be repeated by hand; "" if there is none."""
        return ""

    def connect(self, timeout_s: float, key: str | None) -> Side:
        """Return the side with its server asked, if it has one."""
        return self

    def check(self, plan: ProofPlan) -> None:
        """Raise an error for what cannot be drawn, before anything is."""

    @contextmanager
    def open(
        self, plan: ProofPlan, is_read: OnRead = lambda: None, on_note: OnNote = lambda text: None
    ) -> Iterator[Draw]:
        """Yield what draws its images."""
        yield self.draw

    def draw(self, job: DrawJob) -> DrawnImage:
        """Return one image; of a side that needs nothing to be opened."""
        raise NotImplementedError


def as_png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def suffix_of(content: bytes) -> str:
    """Return the suffix of an image file by its first bytes, or raise DrawingFailure."""
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return ".webp"
    for beginning, suffix in _BEGINNINGS.items():
        if content.startswith(beginning):
            return suffix
    raise DrawingFailure(
        f"{NOT_AN_IMAGE}: it begins with {content[:16]!r}; PNG, JPEG, WebP, BMP and TIFF are read"
    )
