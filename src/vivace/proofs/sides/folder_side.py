"""A folder of images as one side of a proof, with each image's prompt and seed.

Images written by `vivace generate` contain prompt and seed. Others are counted: image k, in the order of names, is of
prompt k, and after the last prompt the next seed begins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.answers.formatting import count
from vivace.architectures import CATALOGUE
from vivace.errors import UsageError
from vivace.foundation.untrusted.files import open_plain, read_bytes, user_path
from vivace.foundation.untrusted.streams import natural_order
from vivace.measure.folders import SUFFIXES
from vivace.proofs.sides.side import (
    SETTINGS,
    Draw,
    DrawingFailure,
    DrawnImage,
    OnNote,
    OnRead,
    Side,
    suffix_of,
)

if TYPE_CHECKING:
    from vivace.proofs.sides.plan import ProofPlan

_MAX_BYTES = 200_000_000


@dataclass(frozen=True)
class FolderSide(Side):
    text: str
    draws = False

    @staticmethod
    def is_written(text: str) -> bool:
        try:
            path = user_path(text)
            return (
                text.lower() not in CATALOGUE and path.is_dir() and not (path / "model_index.json").is_file()
            )
        except (OSError, ValueError):
            return False

    @classmethod
    def parse(cls, text: str) -> FolderSide:
        return cls(text)

    @property
    def untimed(self) -> str:  # type: ignore[override]
        return f"{self.text} is a folder, of which nothing says how long its images took"

    @cached_property
    def folder(self) -> Path:
        return user_path(self.text)

    @cached_property
    def names(self) -> tuple[str, ...]:
        names = [path.name for path in self.folder.iterdir() if path.suffix.lower() in SUFFIXES]
        if not names:
            raise UsageError(f"{self.folder} has no images ({', '.join(SUFFIXES)})")
        return tuple(sorted(names, key=natural_order))

    @cached_property
    def facts(self) -> tuple[dict[str, str], ...]:
        """Each image's own metadata: prompt, seed, size, ...; empty for most images."""
        return tuple(_facts(self.folder / name) for name in self.names)

    @property
    def says_prompts(self) -> bool:
        """Whether every image names its prompt and seed, each of them once."""
        pairs = [(facts.get("prompt"), facts.get("seed", "")) for facts in self.facts]
        return len(set(pairs)) == len(pairs) and all(
            prompt and seed.isascii() and seed.isdigit() for prompt, seed in pairs
        )

    @property
    def defaults(self) -> dict[str, Any]:
        every = [settings_of(facts) for facts in self.facts]
        return {name: value for name, value in every[0].items() if all(s.get(name) == value for s in every)}

    @property
    def identity(self) -> str:
        digest = hashlib.sha256()
        for name in self.names:
            stat = (self.folder / name).stat()
            digest.update(f"{name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        return f"{self.folder.resolve()}@{digest.hexdigest()[:16]}"

    @cached_property
    def by_facts(self) -> dict[tuple[str, int], Path]:
        return {
            (facts["prompt"], int(facts["seed"])): self.folder / name
            for name, facts in zip(self.names, self.facts, strict=True)
        }

    def paths(self, plan: ProofPlan) -> dict[tuple[str, int], Path]:
        """Return the images by prompt and seed: by their own, else in the order of the pairs."""
        if not plan.knows_prompts:
            return {(name, 0): self.folder / name for name in self.names}
        if self.says_prompts:
            return self.by_facts
        if len(plan.pairs) != len(self.names):
            raise UsageError(
                f"{self.folder} has {count(len(self.names), 'image')}, without prompts, for {len(plan.pairs)} pairs of "
                "prompt and seed; give as many prompts (--prompts FILE) times --seeds"
            )
        return {pair: self.folder / name for pair, name in zip(plan.pairs, self.names, strict=True)}

    def check(self, plan: ProofPlan) -> None:
        if plan.request.sizes:
            raise UsageError(
                f"--sizes: {self.text} is a folder, whose images have their own sizes; leave --sizes out"
            )
        self.paths(plan)

    @contextmanager
    def open(
        self, plan: ProofPlan, is_read: OnRead = lambda: None, on_note: OnNote = lambda text: None
    ) -> Iterator[Draw]:
        paths = self.paths(plan)
        yield lambda job: _image_at(paths.get((job.prompt, job.seed)))


def _image_at(path: Path | None) -> DrawnImage:
    if path is None:
        raise DrawingFailure("the folder has no image of this prompt and seed")
    try:
        content = read_bytes(path, _MAX_BYTES)
    except (OSError, ValueError) as error:
        raise DrawingFailure(f"{path} cannot be read: {error}") from None
    return DrawnImage(content, suffix_of(content), settings=settings_of(_facts(path)))


def settings_of(facts: dict[str, str]) -> dict[str, Any]:
    width, _, height = facts.get("size", "").partition("x")
    texts = facts | {"width": width, "height": height}
    kinds = dict.fromkeys(SETTINGS, int) | {"guidance_scale": float, "scheduler": str}
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
