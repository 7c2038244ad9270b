"""An answer in words, 80 columns wide: paragraphs with labels, commands that can be copied, short lists."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

WIDTH = 80


def wrapped(text: str, indent: str = "", first: str | None = None) -> list[str]:
    """Return a paragraph in lines; no word is broken.

    Args:
        indent: of every line; `first` is that of the first one, if it differs.
    """
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def labelled(label: str, text: str, room: int) -> list[str]:
    """Return a paragraph with its label at the left, which has `room` characters."""
    return wrapped(text, " " * room, f"{label:<{room}}")


def command_lines(command: str, label: str, room: int) -> Iterator[str]:
    """Yield a command line, broken before options where it is too long, so that it can still be copied."""
    line = f"{label:<{room}}"
    for part in re.split(r" (?=--)", command):
        if len(line) + len(part) > WIDTH - 3 and line.strip() != label:
            yield f"{line}\\"
            line = " " * (room + 4)
        line += f"{part} "
    yield line.rstrip()
