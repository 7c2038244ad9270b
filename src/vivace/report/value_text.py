"""How the page writes values: intervals, dates, counts, long recipes."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from markupsafe import Markup

from vivace.foundation.stats import Interval

_MAX_LABEL = 60  # characters
_BREAK_POINT = re.compile(r"(?<=\+)(?=[A-Za-z])|(?<=[^\s])(?=@)")


def between_s(interval: Interval) -> str | None:
    """Return the ends of an interval, e.g. "0.783 to 0.905 s", in the unit that `seconds` uses for its point."""
    if interval.low is None or interval.high is None:
        return None
    unit, factor = ("ms", 1e3) if interval.point < 0.1 else ("s", 1.0)
    low, high = (
        f"{v:.0f}" if v >= 99.95 else f"{v:.3g}" for v in (interval.low * factor, interval.high * factor)
    )
    return f"{low} to {high} {unit}"


def breakable(text: str) -> Markup:
    """Allow line breaks between the parts of a recipe. `join` escapes the parts."""
    return Markup("<wbr>").join(_BREAK_POINT.split(text))


def shortened(text: str) -> str:
    """Shorten a recipe for charts and column headings. Both ends stay, since recipes of one study may differ at either
    end."""
    return text if len(text) <= _MAX_LABEL else f"{text[: _MAX_LABEL // 2 - 4]} … {text[-_MAX_LABEL // 2 :]}"


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def date(text: str) -> str:
    """Format a date, e.g. "2026-11-20 11:04 UTC". Text that is not a date is returned as it is."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{time.astimezone(UTC) if time.tzinfo else time:%Y-%m-%d %H:%M} UTC"


def broken(recipe: str, width: int) -> list[str]:
    """Return a recipe in lines of at most `width` characters, broken after plus signs where that is possible."""
    lines = [""]
    for part in re.split(r"(?<=\+)", recipe):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return lines


def whole_words(text: str, width: int) -> str:
    """Break words that are longer than a line after plus signs, so that no technique is torn apart by the terminal."""
    words = ("\n".join(broken(word, width)) if len(word) > width else word for word in text.split(" "))
    return " ".join(words)
