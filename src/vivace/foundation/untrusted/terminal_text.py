"""Make foreign text harmless where it is printed: names of files, classes and components, messages of libraries."""

from __future__ import annotations

import re

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
