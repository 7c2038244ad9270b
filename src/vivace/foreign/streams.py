"""Standard output and error on which foreign text cannot control the terminal.

Names of files, classes and components, prompts and messages of libraries may hold escape sequences. Everything that
this process prints passes through `PlainStream`, whoever prints it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from vivace.foreign.text import plain


class PlainStream:
    """A text stream that writes harmful characters as escapes, and so those that its encoding lacks."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        shown = plain(text)
        try:
            return self.raw.write(shown)
        except UnicodeEncodeError:
            encoding = self.raw.encoding
            return self.raw.write(shown.encode(encoding, "backslashreplace").decode(encoding))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError("bytes would pass unchecked")
        return getattr(self.raw, name)


@contextlib.contextmanager
def plain_output() -> Iterator[None]:
    """Make standard output and error PlainStreams."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (PlainStream(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def unchecked(stream: TextIO) -> TextIO:
    """Return the stream beneath a PlainStream."""
    return stream.raw if isinstance(stream, PlainStream) else stream
