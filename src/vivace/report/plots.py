"""Charts as geometry: numbers that the templates draw as inline SVG.

Text in a chart is HTML or SVG text written by the autoescaping template, so a chart follows the page's colours and
font, stays sharp at any size, and cannot smuggle a string past the escaping. Bars are in percent of their box and
so need one layout for every width; the scatter is laid out once for each width that it is shown at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from vivace.report.rows import Row
from vivace.report.summary import seconds
from vivace.stats import Interval

STAGES = ("text", "steps", "vae", "other")


@dataclass(frozen=True)
class Bar:
    """A bar in percent of its box's width."""

    kind: str
    start: float
    width: float

    @property
    def end(self) -> float:
        return round(self.start + self.width, 2)


@dataclass(frozen=True)
class Fall:
    """One line of the waterfall. `joint` is where the bar before it ended; `leaves` is where this one does."""

    number: int
    recipe: str
    failed: bool
    bar: Bar
    joint: float | None
    leaves: float | None
    change: str
    time: str


@dataclass(frozen=True)
class Breakdown:
    """One recipe's time by stage, all recipes on one scale."""

    number: int
    recipe: str
    failed: bool
    bars: tuple[Bar, ...]
    figures: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True)
class Point:
    """A recipe in the scatter, pixels. `low` and `high` are the ends of its interval, None without one.

    `kind` is the mark's shape and colour; `failed` on quality leaves it hollow, whatever its kind.
    """

    number: int
    recipe: str
    kind: Literal["baseline", "same", "changed"]
    failed: bool
    x: float
    y: float
    low: float | None
    high: float | None
    label_x: float
    label_y: float
    has_leader: bool


@dataclass(frozen=True)
class Scatter:
    width: int
    height: int
    left: float
    right: float
    top: float
    bottom: float
    x_unit: str
    y_unit: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    points: tuple[Point, ...]
    starts_at_zero: bool


def waterfall(rows: Sequence[Row]) -> tuple[Fall, ...]:
    """From the baseline's time down, measured row by measured row, to the time of the last.

    Empty with fewer than two measured rows. A change whose two intervals overlap is of kind `unclear`: the samples
    do not tell the rows apart.
    """
    measured = [(i, r, r.latency.median) for i, r in enumerate(rows, 1) if r.latency is not None]
    if len(measured) < 2:
        return ()
    scale = 100 / max(median.point for _, _, median in measured)
    number, row, before = measured[0]
    end = round(before.point * scale, 2)
    falls = [
        Fall(
            number, row.recipe, row.failed_quality, Bar("total", 0, end), None, end, "", seconds(before.point)
        )
    ]
    for number, row, after in measured[1:]:
        start, end = round(before.point * scale, 2), round(after.point * scale, 2)
        bar = Bar(_change_kind(before, after), min(start, end), round(abs(end - start), 2))
        change, time = _change(before, after), seconds(after.point)
        falls.append(Fall(number, row.recipe, row.failed_quality, bar, start, end, change, time))
        before = after
    end = round(before.point * scale, 2)
    total = Bar("total", 0, end)
    falls.append(Fall(number, row.recipe, row.failed_quality, total, end, None, "", seconds(before.point)))
    return tuple(falls)


def _change_kind(before: Interval, after: Interval) -> str:
    ends = (before.low, before.high, after.low, after.high)
    if None in ends:
        return "unclear"
    assert before.low is not None
    assert before.high is not None
    assert after.low is not None
    assert after.high is not None
    if after.low <= before.high and before.low <= after.high:
        return "unclear"
    return "saving" if after.point < before.point else "loss"


def _change(before: Interval, after: Interval) -> str:
    difference = after.point - before.point
    percent = round(100 * difference / before.point)
    sign = "−" if difference < 0 else "+"
    # In the unit and to the digits of the times that it lies between, so that the column can be added up by eye.
    unit, factor = ("ms", 1e3) if before.point < 0.1 else ("s", 1.0)
    decimals = max(0, 2 - math.floor(math.log10(before.point * factor)))
    return f"{sign}{abs(difference) * factor:.{decimals}f} {unit} ({sign}{abs(percent)} %)"


def breakdowns(rows: Sequence[Row]) -> tuple[Breakdown, ...]:
    """Where each measured recipe spends its time. Stages that no row has are left out."""
    measured = [(i, r) for i, r in enumerate(rows, 1) if r.stages_s]
    longest = max((sum(r.stages_s.values()) for _, r in measured), default=0.0)
    if longest <= 0:
        return ()
    found = []
    for number, row in measured:
        # Known stages in the order of the call; a stage that a newer record adds still counts.
        stages = [s for s in STAGES if s in row.stages_s] + sorted(set(row.stages_s) - set(STAGES))
        bars, start = [], 0.0
        for stage in stages:
            width = 100 * row.stages_s[stage] / longest
            bars.append(Bar(stage if stage in STAGES else "other", round(start, 2), round(width, 2)))
            start += width
        figures = tuple((stage, seconds(row.stages_s[stage])) for stage in stages)
        found.append(Breakdown(number, row.recipe, row.failed_quality, tuple(bars), figures))
    return tuple(found)


_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 30, 44  # room around the plot for tick labels and the axes' names
_DOT = 5.0
_LABEL_HEIGHT = 13.0


def scatter(rows: Sequence[Row], width: int, height: int) -> Scatter | None:
    """Time against peak memory; None with fewer than two points, where there is nothing to compare."""
    found = [
        (i, r, r.latency.median, float(r.memory.peak_bytes))
        for i, r in enumerate(rows, 1)
        if r.latency is not None and r.memory is not None
    ]
    if len(found) < 2:
        return None
    times = [x for _, _, m, _ in found for x in (m.low, m.point, m.high) if x is not None]
    time_unit, per_time = ("ms", 1e3) if max(times) < 0.1 else ("s", 1.0)
    peaks = [peak for *_, peak in found]
    size_unit, per_byte = next(
        ((u, f) for u, f in (("GB", 1e-9), ("MB", 1e-6)) if max(peaks) * f >= 1), ("kB", 1e-3)
    )
    left, right, top, bottom = _LEFT, width - _RIGHT, _TOP, height - _BOTTOM
    x_axis = _Axis.over([t * per_time for t in times], left, right, num_ticks=max(4, width // 110))
    y_axis = _Axis.over([p * per_byte for p in peaks], bottom, top, num_ticks=5)
    places = [(x_axis.place(m.point * per_time), y_axis.place(p * per_byte)) for _, _, m, p in found]
    spans = [
        None
        if m.low is None or m.high is None
        else (x_axis.place(m.low * per_time), x_axis.place(m.high * per_time))
        for _, _, m, _ in found
    ]
    labels = _place_labels([str(n) for n, *_ in found], places, spans, (left, top, right, bottom))
    points = tuple(
        Point(
            number=number,
            recipe=row.recipe,
            kind="baseline"
            if row.is_baseline
            else "same"
            if row.record.trial.recipe.same_picture
            else "changed",
            failed=row.failed_quality,
            x=x,
            y=y,
            low=span[0] if span else None,
            high=span[1] if span else None,
            label_x=label[0],
            label_y=label[1],
            has_leader=math.hypot(label[0] - x, label[1] - y) > 16,
        )
        for (number, row, _, _), (x, y), span, label in zip(found, places, spans, labels, strict=True)
    )
    return Scatter(
        width, height, left, right, top, bottom, time_unit, size_unit, x_axis.ticks, y_axis.ticks, points,
        starts_at_zero=x_axis.low == 0 and y_axis.low == 0,
    )  # fmt: skip


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    start: float
    end: float
    step: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, *, num_ticks: int) -> _Axis:
        """An axis with round ticks. It starts at zero unless that would squeeze the values into its far half."""
        low, high = min(values), max(values)
        pad = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
        low, high = (0.0 if low <= high / 2 else low - pad), high + pad
        rough = (high - low) / num_ticks
        magnitude = 10.0 ** math.floor(math.log10(rough))
        step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
        return cls(low, high, start, end, step)

    def place(self, value: float) -> float:
        return round(self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low), 1)

    @property
    def ticks(self) -> tuple[Tick, ...]:
        decimals = len(f"{self.step:.6f}".rstrip("0").partition(".")[2])
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        return tuple(
            Tick(self.place(k * self.step), f"{k * self.step:.{decimals}f}") for k in range(first, last + 1)
        )


Box = tuple[float, float, float, float]  # left, top, right, bottom


def _place_labels(
    texts: Sequence[str],
    places: Sequence[tuple[float, float]],
    spans: Sequence[tuple[float, float] | None],
    inside: Box,
) -> list[tuple[float, float]]:
    """Centres of the labels: each as near to its point as possible without covering a dot, a label or a bar."""
    dots = [(x - _DOT, y - _DOT, x + _DOT, y + _DOT) for x, y in places]
    bars = [(s[0], y - 1, s[1], y + 1) for (_, y), s in zip(places, spans, strict=True) if s is not None]
    taken: list[Box] = []
    found = []
    for text, place in zip(texts, places, strict=True):
        candidates = list(_around(place, 7.0 * len(text) + 3))
        # Where bars leave no room a label may cross one; it may never cover a dot or another label.
        for obstacles in ([*dots, *taken, *bars], [*dots, *taken], taken):
            free = (b for b in candidates if _fits(b, inside) and not any(_overlap(b, o) for o in obstacles))
            box = next(free, None)
            if box is not None:
                break
        box = box or candidates[0]
        taken.append(box)
        found.append((round((box[0] + box[2]) / 2, 1), round((box[1] + box[3]) / 2, 1)))
    return found


def _around(place: tuple[float, float], width: float) -> Iterator[Box]:
    """Boxes around a point, the nearest first; above before beside, since error bars are horizontal."""
    for distance in range(13, 133, 6):
        for degrees in (-90, 90, -45, -135, 45, 135, 0, 180, -67, -113, 67, 113, -22, -158, 22, 158):
            angle = math.radians(degrees)
            x = place[0] + math.cos(angle) * (distance + (width / 2 - 5) * abs(math.cos(angle)))
            y = place[1] + math.sin(angle) * distance
            yield x - width / 2, y - _LABEL_HEIGHT / 2, x + width / 2, y + _LABEL_HEIGHT / 2


def _fits(box: Box, inside: Box) -> bool:
    return box[0] >= inside[0] and box[1] >= inside[1] and box[2] <= inside[2] and box[3] <= inside[3]


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
