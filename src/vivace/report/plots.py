"""Geometry of the charts: numbers that the templates draw as inline SVG.

All text in a chart is written by the autoescaping template. A chart so follows the page's colours and font, stays
sharp at any size, and cannot bypass the escaping. Bars are in percent of their box, so one layout fits every width;
the scatter plot is laid out once for each width at which it is shown.
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
class WaterfallBar:
    """One bar of the waterfall chart.

    `previous_end` and `end` are the positions of the lines that connect it with the bars above and below; None without
    one. `against` is the number of the row that the change is against; None if that is the bar above.
    """

    number: int
    recipe: str
    failed: bool
    bar: Bar
    previous_end: float | None
    end: float | None
    change: str
    time: str
    against: int | None = None


@dataclass(frozen=True)
class Breakdown:
    """A recipe's time by stage. All recipes share one scale."""

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
    """A recipe in the scatter plot, in pixels. `low` and `high` are the ends of its interval; None without one.

    `kind` sets the mark's shape and colour. The mark of a recipe that `failed` on quality is hollow.
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


def waterfall(rows: Sequence[Row]) -> tuple[WaterfallBar, ...]:
    """Return the bars from the baseline's time through the changes of measured rows.

    A bar is the change against the recipe that the row extends: the one above with most of its techniques and no other,
    or else the baseline. If each row extends the one above, a last bar shows the last row's time. Empty with fewer than
    two measured rows. A change is of kind `unclear` if the two intervals overlap.
    """
    measured = [(i, r, r.latency.median) for i, r in enumerate(rows, 1) if r.latency is not None]
    if len(measured) < 2:
        return ()
    scale = 100 / max(median.point for _, _, median in measured)
    number, row, median = measured[0]
    end = round(median.point * scale, 2)
    parents = [_parent([r for _, r, _ in measured[:k]], measured[k][1]) for k in range(1, len(measured))]
    follows = [parent == k for k, parent in enumerate(parents)]  # whether the parent is the row above
    first = Bar("total", 0, end)
    time = seconds(median.point)
    bars = [
        WaterfallBar(
            number, row.recipe, row.failed_quality, first, None, end if follows[0] else None, "", time
        )
    ]
    is_chain = all(follows)
    for k, (number, row, after) in enumerate(measured[1:]):
        above, _, before = measured[parents[k]]
        start, end = round(before.point * scale, 2), round(after.point * scale, 2)
        leads = follows[k + 1] if k + 1 < len(follows) else is_chain
        bars.append(
            WaterfallBar(
                number,
                row.recipe,
                row.failed_quality,
                Bar(_change_kind(before, after), min(start, end), round(abs(end - start), 2)),
                start if follows[k] else None,
                end if leads else None,
                _change(before, after),
                seconds(after.point),
                None if follows[k] else above,
            )
        )
    if is_chain:
        number, row, median = measured[-1]
        total, time = Bar("total", 0, end), seconds(median.point)
        bars.append(WaterfallBar(number, row.recipe, row.failed_quality, total, end, None, "", time))
    return tuple(bars)


def _parent(above: Sequence[Row], row: Row) -> int:
    """Return the index of the row above that this one extends; 0, the baseline, if it extends no other."""
    techniques = _techniques(row)
    nested = [
        (len(found), index) for index, other in enumerate(above) if (found := _techniques(other)) < techniques
    ]
    return max(nested, default=(0, 0))[1]


def _techniques(row: Row) -> set[str]:
    return {call.model_dump_json() for call in row.record.trial.recipe.techniques}


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
    # In the unit and with the digits of the times around it, so that the column can be added up by eye.
    unit, factor = ("ms", 1e3) if before.point < 0.1 else ("s", 1.0)
    decimals = max(0, 2 - math.floor(math.log10(before.point * factor)))
    return f"{sign}{abs(difference) * factor:.{decimals}f} {unit} ({sign}{abs(percent)} %)"


def breakdowns(rows: Sequence[Row]) -> tuple[Breakdown, ...]:
    """Return where each measured recipe spends its time. Stages that no row has are left out."""
    measured = [(i, r) for i, r in enumerate(rows, 1) if r.stages_s]
    longest = max((sum(r.stages_s.values()) for _, r in measured), default=0.0)
    if longest <= 0:
        return ()
    found = []
    for number, row in measured:
        # Known stages in the order of the call, then unknown stages of newer records.
        stages = [s for s in STAGES if s in row.stages_s] + sorted(set(row.stages_s) - set(STAGES))
        bars, start = [], 0.0
        for stage in stages:
            width = 100 * row.stages_s[stage] / longest
            bars.append(Bar(stage if stage in STAGES else "other", round(start, 2), round(width, 2)))
            start += width
        figures = tuple((stage, seconds(row.stages_s[stage])) for stage in stages)
        found.append(Breakdown(number, row.recipe, row.failed_quality, tuple(bars), figures))
    return tuple(found)


_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 30, 44  # margins for tick labels and axis names
_DOT = 5.0
_LABEL_HEIGHT = 13.0


def scatter(rows: Sequence[Row], width: int, height: int) -> Scatter | None:
    """Plot time against peak memory; None with fewer than two points."""
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
    positions = [(x_axis.position(m.point * per_time), y_axis.position(p * per_byte)) for _, _, m, p in found]
    spans = [
        None
        if m.low is None or m.high is None
        else (x_axis.position(m.low * per_time), x_axis.position(m.high * per_time))
        for _, _, m, _ in found
    ]
    labels = _place_labels([str(n) for n, *_ in found], positions, spans, (left, top, right, bottom))
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
        for (number, row, _, _), (x, y), span, label in zip(found, positions, spans, labels, strict=True)
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
        """Return an axis with round ticks. It starts at zero unless all values would lie in its upper half."""
        low, high = min(values), max(values)
        pad = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
        low, high = (0.0 if low <= high / 2 else low - pad), high + pad
        rough = (high - low) / num_ticks
        magnitude = 10.0 ** math.floor(math.log10(rough))
        step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
        return cls(low, high, start, end, step)

    def position(self, value: float) -> float:
        return round(self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low), 1)

    @property
    def ticks(self) -> tuple[Tick, ...]:
        decimals = len(f"{self.step:.6f}".rstrip("0").partition(".")[2])
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        return tuple(
            Tick(self.position(k * self.step), f"{k * self.step:.{decimals}f}")
            for k in range(first, last + 1)
        )


Box = tuple[float, float, float, float]  # left, top, right, bottom


def _place_labels(
    texts: Sequence[str],
    points: Sequence[tuple[float, float]],
    spans: Sequence[tuple[float, float] | None],
    inside: Box,
) -> list[tuple[float, float]]:
    """Return the labels' centres, each as close to its point as possible without covering a dot, label or bar."""
    dots = [(x - _DOT, y - _DOT, x + _DOT, y + _DOT) for x, y in points]
    bars = [(s[0], y - 1, s[1], y + 1) for (_, y), s in zip(points, spans, strict=True) if s is not None]
    taken: list[Box] = []
    found = []
    for text, point in zip(texts, points, strict=True):
        candidates = list(_around(point, 7.0 * len(text) + 3))
        # If nothing else is free a label may cross a bar, but never a dot or another label.
        for obstacles in ([*dots, *taken, *bars], [*dots, *taken], taken):
            free = (b for b in candidates if _fits(b, inside) and not any(_overlap(b, o) for o in obstacles))
            box = next(free, None)
            if box is not None:
                break
        box = box or candidates[0]
        taken.append(box)
        found.append((round((box[0] + box[2]) / 2, 1), round((box[1] + box[3]) / 2, 1)))
    return found


def _around(point: tuple[float, float], width: float) -> Iterator[Box]:
    """Yield boxes around a point, the nearest first; above before beside, since error bars are horizontal."""
    for distance in range(13, 133, 6):
        for degrees in (-90, 90, -45, -135, 45, 135, 0, 180, -67, -113, 67, 113, -22, -158, 22, 158):
            angle = math.radians(degrees)
            x = point[0] + math.cos(angle) * (distance + (width / 2 - 5) * abs(math.cos(angle)))
            y = point[1] + math.sin(angle) * distance
            yield x - width / 2, y - _LABEL_HEIGHT / 2, x + width / 2, y + _LABEL_HEIGHT / 2


def _fits(box: Box, inside: Box) -> bool:
    return box[0] >= inside[0] and box[1] >= inside[1] and box[2] <= inside[2] and box[3] <= inside[3]


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
