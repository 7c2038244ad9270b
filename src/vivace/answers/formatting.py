"""How figures, durations, dates, recipes and lists are written, everywhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

from vivace.foundation.stats import Interval

_MAX_LABEL = 60  # characters


def seconds(value: float) -> str:
    """Format a time with three significant figures, in s or ms."""
    if value < 0.1:
        return f"{value * 1000:#.3g} ms"
    return f"{value:.0f} s" if value >= 99.95 else f"{value:#.3g} s"


def signed_seconds(value: float) -> str:
    """Format a difference of times, e.g. "-1.20 ms"."""
    return "-" + seconds(-value) if value < 0 else seconds(value)


def clock(value_s: float) -> str:
    """Format a duration in whole seconds, e.g. "3 min 20 s" or "1 h 5 min"."""
    minutes, secs = divmod(round(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {secs} s" if minutes else f"{secs} s"


def size(num_bytes: float) -> str:
    """Format bytes in decimal units, as GPU vendors do."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:#.3g} {unit}".replace(". ", " ")
    return f"{num_bytes:.0f} B"


def plus_minus(interval: Interval) -> str:
    """Return e.g. "0.784 s ±1.2 %"; without the interval if there are too few samples."""
    width = interval.half_width
    return seconds(interval.point) + ("" if width is None else f" ±{100 * width:.1f} %")


def ratio(interval: Interval) -> str:
    """Return e.g. "1.52x [1.49, 1.55]"."""
    text = f"{interval.point:.2f}x"
    if interval.low is None or interval.high is None:
        return text
    return f"{text} [{interval.low:.2f}, {interval.high:.2f}]"


def money(value: float) -> str:
    """Format an amount with three significant figures, at least two of them after the point below 100."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def joules(value: float) -> str:
    """Format an energy, e.g. "1,505 J", "0.81 J"."""
    return f"{value:,.0f} J" if value >= 99.95 else f"{value:#.3g} J"


def between_s(interval: Interval) -> str | None:
    """Return the ends of an interval, e.g. "0.783 to 0.905 s", in the unit that `seconds` uses for its point."""
    if interval.low is None or interval.high is None:
        return None
    unit, factor = ("ms", 1e3) if interval.point < 0.1 else ("s", 1.0)
    low, high = (
        f"{v:.0f}" if v >= 99.95 else f"{v:.3g}" for v in (interval.low * factor, interval.high * factor)
    )
    return f"{low} to {high} {unit}"


def shorten(text: str) -> str:
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


def list_names(names: Sequence[str]) -> str:
    """Return e.g. "a, b and c"."""
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def few(names: Sequence[str], most: int) -> str:
    """Return the first names of a list, and the number of the others."""
    first = ", ".join(names[:most])
    return first if len(names) <= most else f"{first}, and {len(names) - most} more"


def file_stem(text: str) -> str:
    """Return a text as a file name that every system takes, e.g. "org-model-2026-01-31"."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:100] or "vivace"
