"""Geometry of charts: numbers that a template draws as SVG, so that they have the page's colours and its escaping."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from vivace.answers.answer import Bar, BarPart, Bars, Plot, PlotPoint
from vivace.foundation.stats import Interval

WIDTH, HEIGHT = 460, 340  # pixels; the style sheet scales them
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 30, 44  # pixels, for the labels of ticks and axes
_ARROW = 20  # pixels that the mark of a point below the axis leaves for its arrow
_DOT, _LABEL_HEIGHT = 5.0, 13.0  # pixels
_WIDE = 4.0
"""Ratios that differ by more than this factor get a logarithmic axis, on which equal distances are equal factors."""
_EDGE, _GAP = 9.0, 2.4  # percent of a box: between the scale's end and the box's, and between two rounds
Box = tuple[float, float, float, float]  # left, top, right, bottom


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
        num_ticks: int = 5,
        unit: str = "",
        may_start_at_zero: bool = True,
    ) -> Axis:
        """Return a linear axis."""
        low, high = min(values), max(values)
        pad = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
        low, high = (0.0 if may_start_at_zero and low <= high / 2 else low - pad), high + pad
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

    def position(self, value: float) -> float:
        """Return the pixel of a value; that of the axis's end if the value lies beyond it."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.start + (self.end - self.start) * share, 1)

    def span(self, interval: Interval) -> tuple[float, float] | None:
        if interval.low is None or interval.high is None:
            return None
        return self.position(interval.low), self.position(interval.high)

    @property
    def ticks(self) -> tuple[Tick, ...]:
        return tuple(
            Tick(
                self.position(value),
                (f"{value:g}" if self.decimals is None else f"{value:.{self.decimals}f}") + self.unit,
            )
            for value in self.values
        )


@dataclass(frozen=True)
class DrawnPoint:
    """A point with its mark, its intervals and its label, in pixels; None where it has none."""

    point: PlotPoint
    x: float
    y: float
    x_span: tuple[float, float] | None
    y_span: tuple[float, float] | None
    label: tuple[float, float] | None
    is_below: bool

    @property
    def has_leader(self) -> bool:
        """Whether its label is so far away that a line leads to it."""
        return self.label is not None and math.hypot(self.label[0] - self.x, self.label[1] - self.y) > 16


@dataclass(frozen=True)
class DrawnPlot:
    """A plot in pixels.

    Attributes:
        front: the points that no other beats; `steps` is the line through them.
    """

    plot: Plot
    x: Axis
    y: Axis
    points: tuple[DrawnPoint, ...]
    front: tuple[DrawnPoint, ...]
    steps: str
    limits: tuple[tuple[float, str], ...]
    width: int = WIDTH
    height: int = HEIGHT
    left: float = _LEFT
    right: float = WIDTH - _RIGHT
    bottom: float = HEIGHT - _BOTTOM

    @property
    def num_points(self) -> int:
        return len(self.points)


def draw(plot: Plot) -> DrawnPlot:
    left, right, top, bottom = _LEFT, WIDTH - _RIGHT, _TOP, HEIGHT - _BOTTOM
    across = _ends(point.x for point in plot.points)
    x = (
        Axis.of_ratios(across, left, right, num_ticks=max(4, WIDTH // 110))
        if plot.is_ratio
        else Axis.over([0.0, *across], left, right, num_ticks=6, unit=plot.x_unit)
    )
    y = _y_axis(plot, bottom, top)
    below = [plot.better == "more" and point.y.point < y.low for point in plot.points]
    at = [
        (x.position(point.x.point), bottom - _ARROW if cut else y.position(point.y.point))
        for point, cut in zip(plot.points, below, strict=True)
    ]
    spans = [
        (x.span(point.x), None if cut else y.span(point.y))
        for point, cut in zip(plot.points, below, strict=True)
    ]
    boxes = [(a[0], place[1] - 1, a[1], place[1] + 1) for (a, _), place in zip(spans, at, strict=True) if a]
    boxes += [
        (place[0] - 1, min(b), place[0] + 1, max(b)) for (_, b), place in zip(spans, at, strict=True) if b
    ]
    is_numbered = any(point.number is not None for point in plot.points)
    labels: Sequence[tuple[float, float] | None] = (
        place_labels([str(point.number) for point in plot.points], at, boxes, (left, top, right, bottom))
        if is_numbered
        else [None] * len(at)
    )
    points = tuple(
        DrawnPoint(point, *place, *span, label, cut)
        for point, place, span, label, cut in zip(plot.points, at, spans, labels, below, strict=True)
    )
    passing = [drawn for drawn in points if not drawn.point.is_out]
    sign = 1 if plot.better == "more" else -1
    best = tuple(
        passing[i] for i in front([(drawn.point.x.point, sign * drawn.point.y.point) for drawn in passing])
    )
    limits = tuple((y.position(limit), label) for limit, label in plot.limits if y.low <= limit <= y.high)
    return DrawnPlot(plot, x, y, points, best if plot.better else (), _steps(best), limits)


def _ends(intervals: Iterable[Interval]) -> list[float]:
    return [end for i in intervals for end in (i.low, i.point, i.high) if end is not None]


def _y_axis(plot: Plot, bottom: float, top: float) -> Axis:
    """Return the vertical axis. Where more is better, a point that failed by far does not compress the others."""
    limits = [limit for limit, _ in plot.limits]
    if plot.better != "more":
        return Axis.over([*_ends(point.y for point in plot.points), *limits], bottom, top, unit=plot.y_unit)
    kept = _ends(point.y for point in plot.points if not point.is_out) + limits
    if sum(not point.is_out for point in plot.points) < 2:
        in_view = _ends(point.y for point in plot.points)
    else:
        span = max(max(kept) - min(kept), plot.least_span)
        in_view = kept + _ends(p.y for p in plot.points if p.is_out and p.y.point >= min(kept) - span)
    in_view = [*in_view, max(in_view) - plot.least_span]
    return Axis.over(in_view, bottom, top, unit=plot.y_unit, may_start_at_zero=False)


def _steps(best: Sequence[DrawnPoint]) -> str:
    """Return the line that goes down at each point and over to the next one."""
    corners = [(best[0].x, best[0].y)] if best else []
    for before, after in pairwise(best):
        corners += [(before.x, after.y), (after.x, after.y)]
    return " ".join(f"{x},{y}" for x, y in corners)


def front(values: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the values that no other value beats, by the first figure.

    A value is beaten by one that is at least as large in both figures and larger in one.
    """
    best = [
        i
        for i, (x, y) in enumerate(values)
        if not any(a >= x and b >= y and (a, b) != (x, y) for a, b in values)
    ]
    return sorted(best, key=lambda i: (values[i][0], -values[i][1]))


def place_labels(
    texts: Sequence[str], points: Sequence[tuple[float, float]], bars: Sequence[Box], inside: Box
) -> list[tuple[float, float]]:
    """Return the labels' centres, each as close to its point as possible without covering a dot, label or bar.

    Args:
        bars: the lines that should not be crossed, as boxes.
        inside: the box that holds all labels.
    """
    dots = [(x - _DOT, y - _DOT, x + _DOT, y + _DOT) for x, y in points]
    boxes: list[Box] = []
    for text, point in zip(texts, points, strict=True):
        candidates = [box for box in _around(point, 7.0 * len(text) + 3) if _is_inside(box, inside)]
        # If nothing else is free a label may cross a bar, but never a dot or another label.
        free = (
            box
            for obstacles in ([*dots, *boxes, *bars], [*dots, *boxes], boxes)
            for box in candidates
            if not any(_overlap(box, obstacle) for obstacle in obstacles)
        )
        boxes.append(next(free, next(_around(point, 7.0 * len(text) + 3))))
    return [(round((box[0] + box[2]) / 2, 1), round((box[1] + box[3]) / 2, 1)) for box in boxes]


def _around(point: tuple[float, float], width: float) -> Iterator[Box]:
    """Yield boxes around a point, the nearest first; above before beside, since error bars are horizontal."""
    for distance in range(13, 133, 6):
        for degrees in (-90, 90, -45, -135, 45, 135, 0, 180, -67, -113, 67, 113, -22, -158, 22, 158):
            angle = math.radians(degrees)
            x = point[0] + math.cos(angle) * (distance + (width / 2 - 5) * abs(math.cos(angle)))
            y = point[1] + math.sin(angle) * distance
            yield x - width / 2, y - _LABEL_HEIGHT / 2, x + width / 2, y + _LABEL_HEIGHT / 2


def _is_inside(box: Box, inside: Box) -> bool:
    return box[0] >= inside[0] and box[1] >= inside[1] and box[2] <= inside[2] and box[3] <= inside[3]


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@dataclass(frozen=True)
class DrawnBar:
    """A bar in percent of its box; y from the top.

    Attributes:
        dots: (x, y, whether it lies beyond the scale) of each sample.
        levels: (from, to, y) of each round's median.
    """

    bar: Bar
    parts: tuple[BarPart, ...]
    marks: tuple[float, ...]
    dots: tuple[tuple[float, float, bool], ...] = ()
    levels: tuple[tuple[float, float, float], ...] = ()


def draw_bars(chart: Bars) -> list[DrawnBar]:
    ends = [part.start + part.width for bar in chart.bars for part in bar.parts]
    scale = 100 / max([*ends, *(mark for bar in chart.bars for mark in bar.marks)], default=100.0)
    return [
        _draw_samples(bar, chart.reach)
        if bar.samples
        else DrawnBar(
            bar,
            tuple(
                BarPart(round(part.start * scale, 2), round(part.width * scale, 2), part.look)
                for part in bar.parts
            ),
            tuple(round(mark * scale, 2) for mark in bar.marks),
        )
        for bar in chart.bars
    ]


def _draw_samples(bar: Bar, reach: float) -> DrawnBar:
    middle = statistics.geometric_mean(map(statistics.median, bar.samples))

    def y(value: float) -> float:
        return round(50 - max(-1.0, min(1.0, (value / middle - 1) / reach)) * (50 - _EDGE), 1)

    width = (100 - _GAP * (len(bar.samples) - 1)) / sum(map(len, bar.samples))
    dots: list[tuple[float, float, bool]] = []
    levels, start = [], 0.0
    for samples in bar.samples:
        dots += [
            (round(start + (k + 0.5) * width, 2), y(value), abs(value / middle - 1) > reach)
            for k, value in enumerate(samples)
        ]
        end = start + width * len(samples)
        levels.append((round(start, 2), round(end, 2), y(statistics.median(samples))))
        start = end + _GAP
    return DrawnBar(bar, (), (), tuple(dots), tuple(levels))
