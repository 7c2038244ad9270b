"""A folder of images as one side of a proof, with each image's prompt and seed.

Images written by `vivace generate` contain prompt and seed. Others are counted: image k, in the order of names, is of
prompt k, and after the last prompt the next seed begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from vivace.answers.formatting import count
from vivace.errors import UsageError
from vivace.foundation.untrusted.files import open_plain, read_bytes, user_path
from vivace.foundation.untrusted.terminal_text import natural_order
from vivace.proofs.sides.drawing import DrawingFailed, DrawnImage, Settings, suffix_of

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
_MAX_BYTES = 200_000_000


@dataclass(frozen=True)
class FolderImages:
    """The images of a folder, by their names in natural order.

    Attributes:
        facts: each image's own metadata: prompt, seed, size, ...; empty for most images.
    """

    folder: Path
    names: tuple[str, ...]
    facts: tuple[dict[str, str], ...]

    @property
    def say_their_prompts(self) -> bool:
        """Whether every image names its prompt and seed, each of them once."""
        pairs = [(facts.get("prompt"), facts.get("seed", "")) for facts in self.facts]
        return len(set(pairs)) == len(pairs) and all(
            prompt and seed.isascii() and seed.isdigit() for prompt, seed in pairs
        )

    @property
    def settings(self) -> Settings:
        """The settings that all images name in their own metadata."""
        every = [settings_of(facts) for facts in self.facts]
        shared = {name: value for name, value in every[0].items() if all(s.get(name) == value for s in every)}
        return Settings().filled(shared)

    def by_facts(self) -> dict[tuple[str, int], Path]:
        """Return the images by the prompt and seed in their own metadata."""
        return {
            (facts["prompt"], int(facts["seed"])): self.folder / name
            for name, facts in zip(self.names, self.facts, strict=True)
        }

    def by_order(self, pairs: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Path]:
        """Return the images by prompts and seeds, in this order.

        Raises:
            UsageError: there are more or fewer.
        """
        if len(pairs) != len(self.names):
            raise UsageError(
                f"{self.folder} has {count(len(self.names), 'image')}, without prompts, for {len(pairs)} pairs of "
                "prompt and seed; give as many prompts (--prompts FILE) times --seeds"
            )
        return {pair: self.folder / name for pair, name in zip(pairs, self.names, strict=True)}

    def by_name(self) -> dict[tuple[str, int], Path]:
        """Return the images by name, in the place of a prompt."""
        return {(name, 0): self.folder / name for name in self.names}


class Folder:
    """A folder that draws: it returns the image of a prompt and seed."""

    def __init__(self, images: dict[tuple[str, int], Path]) -> None:
        self._images = images

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def draw(self, prompt: str, seed: int, settings: Settings) -> DrawnImage:
        """Return one image; see `Drawer.draw`."""
        path = self._images.get((prompt, seed))
        if path is None:
            raise DrawingFailed("the folder has no image of this prompt and seed")
        try:
            content = read_bytes(path, _MAX_BYTES)
        except (OSError, ValueError) as error:
            raise DrawingFailed(f"{path} cannot be read: {error}") from None
        return DrawnImage(content, suffix_of(content), settings=settings_of(_facts(path)))


def read_folder(name: str) -> FolderImages:
    """Return the images of a folder.

    Raises:
        UsageError: there are none.
    """
    folder = user_path(name)
    names = sorted((p.name for p in folder.iterdir() if p.suffix.lower() in SUFFIXES), key=natural_order)
    if not names:
        raise UsageError(f"{folder} has no images ({', '.join(SUFFIXES)})")
    return FolderImages(folder, tuple(names), tuple(_facts(folder / name) for name in names))


def settings_of(facts: dict[str, str]) -> dict[str, Any]:
    """Return how an image was drawn, from its own metadata."""
    width, _, height = facts.get("size", "").partition("x")
    texts = facts | {"width": width, "height": height}
    kinds = {
        "width": int,
        "height": int,
        "num_inference_steps": int,
        "guidance_scale": float,
        "scheduler": str,
    }
    try:
        return {name: kind(texts[name]) for name, kind in kinds.items() if texts.get(name)}
    except ValueError:
        return {}


def _facts(path: Path) -> dict[str, str]:
    """Return the text of a PNG file; empty for other files, and for damaged ones, which are reported later."""
    from PIL import Image

    try:
        with open_plain(path, _MAX_BYTES) as file, Image.open(file, formats=("PNG",)) as image:
            info = dict(image.info)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return {}
    return {key: str(value) for key, value in info.items() if isinstance(key, str) and isinstance(value, str)}
