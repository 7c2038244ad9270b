"""Read the cells of tables: numbers with units, as people write them."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

_TIMES = {
    1.0: ("s", "sec", "secs", "second", "seconds"),
    1e-3: ("ms", "msec", "msecs", "millisecond", "milliseconds"),
    1e-6: ("us", "µs", "μs", "usec", "microsecond", "microseconds"),
    1e-9: ("ns", "nanosecond", "nanoseconds"),
    60.0: ("min", "mins", "minute", "minutes"),
    3600.0: ("h", "hr", "hrs", "hour", "hours"),
}
_SIZES = {
    1.0: ("b", "byte", "bytes"),
    1e3: ("kb",), 1e6: ("mb",), 1e9: ("gb", "gigabytes"), 1e12: ("tb",),
    2.0**10: ("kib",), 2.0**20: ("mib",), 2.0**30: ("gib",), 2.0**40: ("tib",),
}  # fmt: skip
_SHARES = {
    "percent": ("%", "percent", "pct", "% faster", "% slower", "% quicker", "% less", "% lower", "% more", "% higher",
                "percent faster", "percent slower", "% speedup", "% speed-up", "% improvement", "% reduction"),
    "ratio": ("x", "×", "x faster", "× faster", "x slower", "× slower", "times", "times faster", "times slower",
              "x speedup", "x speed-up", "-fold", "fold"),
}  # fmt: skip
IMAGES = frozenset({"img", "imgs", "image", "images", "pic", "pics", "picture", "pictures", "sample", "samples",
                    "frame", "frames"})  # fmt: skip
STEPS = ("it", "its", "iter", "iters", "iteration", "iterations", "step", "steps")
CALLS = ("call", "calls", "run", "prompt", "request", "generation", "batch")


def _by_name(units: dict[float, tuple[str, ...]], kind: str) -> dict[str, tuple[str, float]]:
    return {name: (kind, factor) for factor, names in units.items() for name in names}


SECONDS = {name: factor for name, (_, factor) in _by_name(_TIMES, "time").items()}
UNITS: dict[str, tuple[str, float]] = (
    _by_name(_TIMES, "time")
    | _by_name(_SIZES, "bytes")
    | {name: (kind, 1.0) for kind, names in _SHARES.items() for name in names}
    | {"fps": ("images a second", 1.0)}
)
"""The kind and factor of each unit; seconds and bytes are the units inside."""


def unit_of(text: str) -> tuple[str, float] | None:
    """Return the kind of a unit and its factor to seconds, bytes, or one a second; None if it is unknown.

    Kinds: "time", "bytes", "percent", "ratio", "images a second", "steps a second", "time an image", "time a step". A
    call's time is "time".
    """
    name = re.sub(r"\s*(?:/|\bper\b|\ban?\b(?=\s+\w))\s*", "/", " ".join(text.lower().split())).strip(". ")
    if name in UNITS:
        return UNITS[name]
    above, slash, below = name.partition("/")
    if not slash:
        return None
    if below in SECONDS and (above in IMAGES or above in STEPS):
        kind = "images a second" if above in IMAGES else "steps a second"
        return kind, 1 / SECONDS[below]
    if above in SECONDS:
        for names, kind in ((IMAGES, "time an image"), (STEPS, "time a step"), (CALLS, "time")):
            if below in names:
                return kind, SECONDS[above]
    return None


Mark = Literal[".", ","]
"""A decimal mark."""
_GAP = " \u00a0\u2009\u202f'’_"
_NUMBER = re.compile(
    r"(?P<before>[~≈]?\s*[(x×]?\s*)(?P<sign>[-+−–]?)\s?"
    rf"(?P<body>\d{{1,3}}(?:[{_GAP}]\d{{3}})+(?:[.,]\d+)?(?!\d)|\d[\d.,]*\d|\d|[.,]\d+)"
    r"(?:[eE](?P<exponent>[-+]?\d+))?(?P<rest>.*)$",
    re.DOTALL,
)
_CUT = re.compile(r"[()\[\];]|±|\+/-")
_AFTER_SPREAD = re.compile(r"\s*(?:±|\+/-)\s*[\d.,]+\s*(?P<unit>[^\s%\d(\[][^(\[]*)?")
_BRACKETS = re.compile(r"\[\s*([\d.,]*\d)\s*(?:[,;]\s|,|-|–|\.\.\.?|to\b)\s*([\d.,]*\d)\s*\]")
_PLUS_MINUS = re.compile(r"(?:±|\+/-)\s*([\d.,]*\d)\s*(%?)")
_PARTS = re.compile(
    r"(?:(\d+)\s*(?:h|hrs?|hours?))?\s*(?:(\d+)\s*(?:m|mins?|minutes?))?\s*(?:(\d+(?:[.,]\d+)?)\s*(?:s|secs?|seconds?))?$",
    re.IGNORECASE,
)
_CLOCK = re.compile(r"(?:(\d+):)?(\d{1,3}):(\d{2}(?:[.,]\d+)?)$")
_MISSING = frozenset({"", "-", "–", "—", "−", "n/a", "na", "nan", "null", "none", "?", "...", "…", "/", "tbd", "n.a.",
                      "x", "✗", "❌"})  # fmt: skip
_MARKS = re.compile(r"[*†‡§¹²³⁴⁵↑↓▲▼✓✔✅⚡🔥⭐🚀⚠\ufe0f]+")
_POINT = re.compile(r"(?:\d+|\d{1,3}(?:,\d{3})+)?(?:\.\d+)?")
_COMMA = re.compile(r"(?:\d+|\d{1,3}(?:\.\d{3})+)?(?:,\d+)?")
_EITHER = re.compile(r"[1-9]\d{0,2},\d{3}")
_WEAK_POINT = re.compile(r"[1-9]\d{0,2}\.\d{3}")


@dataclass(frozen=True)
class Number:
    """A number as written.

    Attributes:
        value: in seconds, bytes, or one a second if it has such a unit.
        half_ulp: half of its last digit: what rounding may have taken or added.
        kind: see `unit_of`; None without a unit.
        text: the cell.
        interval: what the cell gives as its interval, in the unit of `value`: "1.06x [0.97, 1.16]", "1.07 s ±8.2 %",
            "107 ms ± 9"; None if it gives none.
    """

    value: float
    half_ulp: float
    kind: str | None
    text: str
    interval: tuple[float, float] | None = None

    @property
    def least(self) -> float:
        return self.value - self.half_ulp

    @property
    def most(self) -> float:
        return self.value + self.half_ulp

    @property
    def is_precise(self) -> bool:
        return self.value > 0 and self.half_ulp / self.value < 0.005

    def scaled(self, factor: float, kind: str | None) -> Number:
        """Return the number in the unit of its column; one that has its own unit stays."""
        return self if self.kind is not None or kind is None else self._times(factor, kind)

    def inverse(self, kind: str) -> Number:
        """Return one over the number, as the time of a rate. A number that is not above zero keeps its value."""
        if self.least <= 0:
            return replace(self, kind=kind, interval=None)
        value = 1 / self.value
        return Number(value, 1 / self.least - value, kind, self.text)

    def _times(self, factor: float, kind: str | None) -> Number:
        ends = None if self.interval is None else (self.interval[0] * factor, self.interval[1] * factor)
        return Number(self.value * factor, self.half_ulp * factor, kind, self.text, ends)


def read_number(text: str, mark: Mark = ".") -> Number | None:
    """Return the number at the start of a cell; None if there is none, as in "null", "-", "1-4" or "fp16".

    Args:
        mark: what stands before decimals where both are possible: "1,234" is 1234 or 1.234.
    """
    cell = plain_cell(text)
    if is_missing(cell):
        return None
    if (duration := _duration(cell)) is not None:
        return replace(duration, text=text.strip())
    match = _NUMBER.match(cell)
    if match is None:
        return None
    parsed = _parsed(match["body"], mark)
    unit = _unit(match["rest"])
    if parsed is None or unit is None:
        return None
    kind, factor = unit
    if kind is None and match["before"].strip()[-1:] in ("x", "×"):
        kind = "ratio"
    value, decimals = parsed
    exponent = int((match["exponent"] or "0")[:4])
    value = value * 10.0**exponent * (-1 if match["sign"] in ("-", "−", "–") else 1)
    # A number without decimals is a count or a round figure; computed ones have too many digits to be rounded.
    half = 0.5 * 10.0 ** (exponent - decimals) if decimals - exponent < 12 else 0.0
    ends = _interval(match["rest"], value, mark)
    return Number(value, half, None, text.strip(), ends)._times(factor, kind)


def is_missing(cell: str) -> bool:
    return plain_cell(cell).lower() in _MISSING


def decimal_mark(cells: Iterable[str]) -> tuple[Mark | None, bool]:
    """Return the decimal mark of a column's cells, None if they leave it open, and whether that matters.

    It matters where a cell such as "1,234" is 1234 or 1.234.
    """
    is_point = is_weak = is_comma = is_whole = matters = False
    for cell in cells:
        match = _NUMBER.match(plain_cell(cell))
        if match is None:
            continue
        body = re.sub(f"[{_GAP}]", "", match["body"])
        if _EITHER.fullmatch(body):
            matters = True
        elif _WEAK_POINT.fullmatch(body):
            is_weak = True
        elif "." not in body and "," not in body:
            is_whole |= len(body) <= 3
        elif _POINT.fullmatch(body) and not body.startswith("0,"):
            is_point = True
        elif _COMMA.fullmatch(body):
            is_comma = True
    if is_comma:
        return ",", matters
    # Decimals that are cut where they are zero leave fewer than three; whole numbers beside 1,234 are below 1,000.
    return ("." if is_point or (matters and (is_whole or is_weak)) else None), matters


def plain_cell(text: str) -> str:
    """Return a cell without Markdown's emphasis, links, code marks and escapes, HTML's tags, and footnote marks."""
    if not text.isalnum():
        text = re.sub(r"\\([_*|<>#`~\[\]-])", r"\1", html.unescape(re.sub(r"<[^<>]{1,200}>", " ", text)))
        text = re.sub(r"!?\[([^\[\]]*)\]\([^()]*\)", r"\1", text)
        text = re.sub(r"\*\*|__|`|\[\^[^\]]*\]", "", text)
        text = _MARKS.sub("", text.strip().strip("*'\""))
    return " ".join(text.split(" ")).strip()


def _parsed(body: str, mark: Mark) -> tuple[float, int] | None:
    body = re.sub(f"[{_GAP}]", "", body)
    if body.startswith("0,"):  # no thousands begin with zero
        mark = ","
    for mark_ in (mark, "," if mark == "." else "."):
        if (_POINT if mark_ == "." else _COMMA).fullmatch(body):
            whole, _, decimals = body.replace("," if mark_ == "." else ".", "").partition(mark_)
            return float(f"{whole or 0}.{decimals or 0}"), len(decimals)
    return None


def _unit(rest: str) -> tuple[str | None, float] | None:
    """Return the kind and factor of a number's unit; (None, 1) without a unit, None if other text follows."""
    name = _CUT.split(rest, maxsplit=1)[0].strip()
    if not name and (spread := _AFTER_SPREAD.match(rest)):
        name = (spread["unit"] or "").strip(" )")
    if not name:
        name = next(
            (part.strip() for part in _CUT.split(rest) if unit_of(part.strip()) and ")" in rest[:1]), ""
        )
    return unit_of(name) if name else (None, 1.0)


def _interval(rest: str, value: float, mark: Mark) -> tuple[float, float] | None:
    if match := _BRACKETS.search(rest):
        low, high = (_parsed(end, mark) for end in match.groups())
        return (low[0], high[0]) if low is not None and high is not None else None
    if match := _PLUS_MINUS.search(rest):
        spread = _parsed(match[1], mark)
        if spread is not None:
            width = abs(value) * spread[0] / 100 if match[2] else spread[0] * _ratio(rest)
            return value - width, value + width
    return None


def _ratio(rest: str) -> float:
    """Return how many units of a number one unit of its spread is: 0.001 in " s ± 90 ms"."""
    own = unit_of(_CUT.split(rest, maxsplit=1)[0].strip())
    after = _AFTER_SPREAD.search(rest)
    spread = unit_of((after["unit"] or "").strip(" )")) if after is not None else None
    return spread[1] / own[1] if own is not None and spread is not None and own[0] == spread[0] else 1.0


def _duration(cell: str) -> Number | None:
    """Return the seconds of "1m32s", "1 min 32 s" or "1:32"; None for everything else."""
    match = _PARTS.match(cell)
    if match is None or sum(part is not None for part in match.groups()) < 2:
        match = _CLOCK.match(cell)
    if match is None:
        return None
    hours, minutes, seconds = (part.replace(",", ".") if part else "0" for part in match.groups())
    value = int(hours) * SECONDS["h"] + int(minutes) * SECONDS["min"] + float(seconds)
    decimals = len(seconds.partition(".")[2])
    return Number(value, 0.5 * 10.0**-decimals, "time", cell)
