"""The axes of the charts: round ticks, and the pixel of a value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDE = 4.0
"""Ratios that differ by more than this factor get a logarithmic axis, on which equal distances are equal factors."""


@dataclass(frozen=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic axis from `low` to `high`, drawn from pixel `start` to pixel `end`.

    `decimals` are those of the ticks; None for as many as each needs.
    """

    low: float
    high: float
    start: float
    end: float
    values: tuple[float, ...]
    decimals: int | None
    unit: str = ""
    is_log: bool = False

    @classmethod
    def over(
        cls,
        values: Sequence[float],
        start: float,
        end: float,
        *,
        num_ticks: int,
        unit: str = "",
        may_start_at_zero: bool = True,
    ) -> Axis:
        """Return a linear axis.

        Args:
            unit: written after each tick.
            may_start_at_zero: whether it starts at zero unless all values would lie in its upper half.
        """
        low, high = min(values), max(values)
        pad = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
        starts_at_zero = may_start_at_zero and low <= high / 2
        low, high = (0.0 if starts_at_zero else low - pad), high + pad
        rough = (high - low) / num_ticks
        magnitude = 10.0 ** math.floor(math.log10(rough))
        step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
        decimals = len(f"{step:.6f}".rstrip("0").partition(".")[2])
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        ticks = tuple(k * step for k in range(first, last + 1))
        return cls(low, high, start, end, ticks, decimals, unit)

    @classmethod
    def of_ratios(cls, values: Sequence[float], start: float, end: float, *, num_ticks: int) -> Axis:
        """Return an axis for ratios; a logarithmic one if they differ widely."""
        low, high = min(values), max(values)
        if low <= 0 or high / low <= _WIDE:
            return cls.over(values, start, end, num_ticks=num_ticks, unit="×", may_start_at_zero=False)
        factor = (high / low) ** 0.06
        low, high = low / factor, high * factor
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks: tuple[float, ...] = ()
        for digits in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1,)):
            ticks = tuple(d * 10.0**k for k in powers for d in digits if low <= d * 10.0**k <= high)
            if len(ticks) <= num_ticks + 1:
                break
        return cls(low, high, start, end, ticks, None, "×", is_log=True)

    @property
    def starts_at_zero(self) -> bool:
        return self.low == 0

    def position(self, value: float) -> float:
        """Return the pixel of a value; that of the axis's end if the value lies beyond it."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.start + (self.end - self.start) * share, 1)

    @property
    def ticks(self) -> tuple[Tick, ...]:
        return tuple(Tick(self.position(value), self._label(value)) for value in self.values)

    def _label(self, value: float) -> str:
        number = f"{value:g}" if self.decimals is None else f"{value:.{self.decimals}f}"
        return number + self.unit
