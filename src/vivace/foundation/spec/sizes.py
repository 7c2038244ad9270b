"""Sizes of images in the notation of recipes: "768x512" is 768 pixels wide and 512 high."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
MULTIPLE = 8
"""Multiple of width and height, pixels: the least that every model requires."""


class Size(NamedTuple):
    """Width and height in pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"

    @classmethod
    def of(cls, text: str) -> Size:
        """Read "WIDTHxHEIGHT"."""
        match = _SIZE.fullmatch(text)
        if match is None:
            raise ValueError(f"a size is WIDTHxHEIGHT in pixels, e.g. 768x512; got {text!r}")
        size = cls(int(match[1]), int(match[2]))
        if size.width % MULTIPLE or size.height % MULTIPLE:
            raise ValueError(f"width and height must be multiples of {MULTIPLE}; got {text}")
        return size


def each_once(sizes: str | Sequence[str | tuple[int, int]]) -> tuple[Size, ...]:
    """Read sizes, each once: "512x512,512x768", several such texts, or widths and heights."""
    parts = (sizes,) if isinstance(sizes, str) else sizes
    texts = [part if isinstance(part, str) else "{}x{}".format(*part) for part in parts]
    return tuple(dict.fromkeys(Size.of(text.strip()) for several in texts for text in several.split(",")))


def in_order(texts: Iterable[str]) -> tuple[Size, ...]:
    """Read sizes, each once, the smallest first."""
    return tuple(sorted({Size.of(text) for text in texts}, key=lambda s: (s.width * s.height, s.width)))
