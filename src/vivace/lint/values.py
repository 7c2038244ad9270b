"""Read the cells of tables: numbers with units, as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TIMES = {"s": 1.0, "sec": 1.0, "secs": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9,
          "min": 60.0}  # fmt: skip
_SIZES = {"b": 1.0, "bytes": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2.0**10, "mib": 2.0**20,
          "gib": 2.0**30}  # fmt: skip
UNITS: dict[str, tuple[str, float]] = (
    {name: ("time", factor) for name, factor in _TIMES.items()}
    | {name: ("bytes", factor) for name, factor in _SIZES.items()}
    | {"%": ("percent", 1.0), "x": ("ratio", 1.0), "×": ("ratio", 1.0)}
)
"""The kind and factor of each unit; seconds and bytes are the units inside."""
_NUMBER = re.compile(
    r"^[~≈]?\s*(?P<number>[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.(?P<decimals>\d+))?(?:[eE](?P<exponent>[-+]?\d+))?)\s*"
    r"(?P<unit>[A-Za-zµμ%×]+)?(?=$|[\s(\[±;])"
)
_BRACKETS = re.compile(r"\[\s*([\d.]+)\s*,\s*([\d.]+)\s*\]")
_PLUS_MINUS = re.compile(r"±\s*([\d.]+)\s*%")


@dataclass(frozen=True)
class Number:
    """A number as written.

    Attributes:
        value: in seconds or bytes if it has such a unit.
        half_ulp: half of its last digit: what rounding may have taken or added.
        kind: "time", "bytes", "percent", "ratio"; None without a unit.
        text: the cell.
    """

    value: float
    half_ulp: float
    kind: str | None
    text: str

    @property
    def least(self) -> float:
        return self.value - self.half_ulp

    @property
    def most(self) -> float:
        return self.value + self.half_ulp

    @property
    def interval(self) -> tuple[float, float] | None:
        """What the cell gives as its interval, "1.06x [0.97, 1.16]" or "1.07 s ±8.2 %"; None if it gives none."""
        if found := _BRACKETS.search(self.text):
            return float(found[1]), float(found[2])
        if found := _PLUS_MINUS.search(self.text):
            share = float(found[1]) / 100
            return self.value * (1 - share), self.value * (1 + share)
        return None

    def scaled(self, factor: float, kind: str | None) -> Number:
        """Return the number in the unit of its column; one that has its own unit stays."""
        if self.kind is not None or kind is None:
            return self
        return Number(self.value * factor, self.half_ulp * factor, kind, self.text)


def read_number(text: str) -> Number | None:
    """Return the number at the start of a cell; None if there is none, as in "null", "-", "1-4" or "fp16"."""
    found = _NUMBER.match(plain_cell(text))
    if found is None:
        return None
    unit = (found["unit"] or "").lower()
    if unit and unit not in UNITS:
        return None
    kind, factor = UNITS.get(unit, (None, 1.0))
    value = float(found["number"].replace(",", ""))
    digits = len(found["decimals"] or "") - int(found["exponent"] or 0)
    # A number without decimals is a count or a round figure; computed ones have too many digits to be rounded.
    half = 0.5 * 10.0**-digits if digits < 12 else 0.0
    return Number(value * factor, half * factor, kind, text.strip())


def plain_cell(text: str) -> str:
    """Return a cell without Markdown's emphasis, code marks and escapes."""
    return re.sub(r"\\([_*|<])", r"\1", text).strip().strip("*`'").strip()
