"""Standard output and error that foreign text cannot use to control the terminal; standard output carries data alone.

Names of files, classes and components, prompts and messages of libraries may hold escape sequences. Everything that
this process prints passes through `PlainStream`, whoever prints it.

Standard output is for what a command answers: a program may read it. What libraries print there goes to standard
error, whether by Python's `print`, by C, or in a process that they start.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, TextIO

# Control characters (terminals obey them), line separators, surrogates (cannot be encoded), and marks that reverse the
# direction of the text after them.
_HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_LINE_END = re.compile("\r\n|\n|\r")
_DIGITS = re.compile("([0-9]+)")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def plain(text: str) -> str:
    r"""Return the text with harmful characters written as escapes (`\x1b`); tabs and newlines stay."""
    return _HARMFUL.sub(_escaped, text)


def lines_of(text: str) -> list[str]:
    """Return the lines of a text file as editors number them.

    Not `str.splitlines`, which also ends a line at a line separator (U+2028), a form feed and six more characters that
    may stand inside a prompt.
    """
    lines = _LINE_END.split(text)
    return lines if lines[-1] else lines[:-1]


def natural_order(name: str) -> tuple[object, ...]:
    """Return a key that sorts names as people number them: image_2.png before image_10.png."""
    stem, dot, suffix = name.rpartition(".")
    parts = _DIGITS.split(stem if dot else name)
    # Texts and numbers alternate, so that a text is never compared with a number.
    key = tuple(int(part) if index % 2 else part.casefold() for index, part in enumerate(parts))
    return (key, suffix.casefold(), name)


def markdown_cell(text: str) -> str:
    """Return the text as a cell of a Markdown table: one line, and nothing in it is a column, a tag or a link."""
    one_line = plain(" ".join(text.splitlines()))
    return one_line.replace("|", "\\|").replace("<", "\\<").replace("](", "]\\(")


def markdown_code_cell(text: str) -> str:
    """Return the text as code in a cell of a Markdown table."""
    one_line = plain(" ".join(text.splitlines())).replace("|", "\\|")
    fence = "`" if "`" not in one_line else "`" * (1 + max(map(len, re.findall("`+", one_line))))
    return f"{fence}{one_line}{fence}" if fence == "`" else f"{fence} {one_line} {fence}"


def csv_cell(value: object) -> object:
    """Return a value that no spreadsheet reads as a formula: text that begins like one gets an apostrophe.

    Numbers stay numbers. See OWASP, CSV injection.
    """
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if value.lstrip(" ").startswith(_FORMULA) else text


def _escaped(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


_WRITERS = ("click", "rich", "contextlib", __name__)
"""Modules that print on behalf of their callers."""
_OWN = ("vivace",)
_data: TextIO | None = None
_PLAINER = "vivace.plainer"
_SUBSTITUTES = dict(
    zip(
        "▁▂▃▄▅▆▇█–−’“”×±…",
        ("_", ".", ":", "-", "=", "+", "*", "#", "-", "-", "'", '"', '"', "x", "+-", "..."),
        strict=True,
    )
)
"""Replacements for characters of vivace's own texts that an encoding lacks; all others are written as escapes."""


def _plainer(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    texts = (_SUBSTITUTES.get(c) or c.encode("ascii", "backslashreplace").decode() for c in lacking)
    return "".join(texts), error.end


codecs.register_error(_PLAINER, _plainer)


class PlainStream:
    """A text stream that escapes harmful characters and those that its encoding lacks.

    Args:
        others: where text goes that is printed by neither vivace nor, on its behalf, click or rich; None: here too.
    """

    def __init__(self, raw: TextIO, others: PlainStream | None = None) -> None:
        self.raw = raw
        self._others = others

    def write(self, text: str) -> int:
        if self._others is not None and not _is_own(sys._getframe(1)):
            return self._others.write(text)
        printable = plain(text)
        try:
            return self.raw.write(printable)
        except UnicodeEncodeError:
            encoding = self.raw.encoding
            return self.raw.write(printable.encode(encoding, _PLAINER).decode(encoding))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def fileno(self) -> int:
        # Who asks for it writes past this stream, or hands it to a child.
        return self.raw.fileno() if self._others is None else self._others.fileno()

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError("bytes would pass unchecked")
        return getattr(self.raw, name)


@contextlib.contextmanager
def plain_output() -> Iterator[None]:
    """Make standard output and error PlainStreams, and keep what libraries and children print off standard output."""
    _open_closed()
    before = sys.stdout, sys.stderr
    with _data_alone():
        errors = PlainStream(sys.stderr)
        sys.stdout, sys.stderr = PlainStream(sys.stdout, errors), errors
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def unchecked(stream: TextIO) -> TextIO:
    """Return the stream beneath a PlainStream."""
    return stream.raw if isinstance(stream, PlainStream) else stream


def standard_output() -> int:
    """Return the descriptor of standard output for a command's answer."""
    return 1 if _data is None else _data.fileno()


def _open_closed() -> None:
    """Open closed standard streams (`>&-`) on the null device: the next opened file would get their numbers."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_WRONLY)
            if handle != number:
                os.dup2(handle, number)
                os.close(handle)
            setattr(sys, name, os.fdopen(number, "w", closefd=False, encoding="utf-8"))


@contextlib.contextmanager
def _data_alone() -> Iterator[None]:
    """Move standard output to another descriptor, and send what C libraries and children write to standard error.

    Nothing is changed where standard output is not this process's own, as under a test.
    """
    global _data
    try:
        is_own = sys.stdout.fileno() == 1 and sys.stderr.fileno() == 2
    except (AttributeError, OSError, ValueError):  # closed, or no file
        is_own = False
    if not is_own:
        yield
        return
    before = sys.stdout
    before.flush()
    number = os.dup(1)
    data = io.TextIOWrapper(
        os.fdopen(number, "wb", closefd=False),
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=bool(before.line_buffering),
    )
    os.dup2(2, 1)
    sys.stdout = _data = data
    try:
        yield
    finally:
        sys.stdout, _data = before, None
        with contextlib.suppress(OSError):  # it was reported when the command wrote it
            data.flush()
        os.dup2(number, 1)
        discard(number)
        data.close()
        os.close(number)


def discard(number: int) -> None:
    """Discard further output to a file that nobody reads any more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def _is_own(frame: FrameType | None) -> bool:
    """Return whether vivace prints: the first caller that prints for itself is a module of its own."""
    while frame is not None:
        package = frame.f_globals.get("__name__", "")
        if not _is_of(package, _WRITERS):
            return _is_of(package, _OWN)
        frame = frame.f_back
    return False


def _is_of(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
