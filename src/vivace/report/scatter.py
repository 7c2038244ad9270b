"""Scatter plots: each recipe's speed-up against its quality, and against its peak memory, with the Pareto front.

All text in a chart is written by the autoescaping template. A plot is laid out for each width at which it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from vivace.answers.formatting import size
from vivace.foundation.stats import Interval
from vivace.report.rows import Row

SIZES = (("wide", 500, 360), ("narrow", 340, 320))
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 30, 44  # pixels, for tick labels and the names of the axes
_ARROW = 20  # pixels that the mark of a recipe below the axis leaves for its arrow
_LEAST_SPAN = 0.05
"""Quality axes cover at least this much, so that noise does not look like a difference."""
_DOT, _LABEL_HEIGHT = 5.0, 13.0  # pixels

Box = tuple[float, float, float, float]  # left, top, right, bottom
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


@dataclass(frozen=True)
class Point:
    """A recipe in the plot, in pixels.

    `left`, `right`, `upper` and `lower` are the ends of its intervals; None without one. `kind` sets the mark's shape
    and colour; the mark of a recipe that `failed` on quality is hollow. `is_below` if it lies below the axis's end.
    """

    number: int
    recipe: str
    kind: Literal["baseline", "same", "changed"]
    failed: bool
    doubtful: bool
    x: float
    y: float
    left: float | None
    right: float | None
    upper: float | None
    lower: float | None
    label_x: float
    label_y: float
    has_leader: bool
    is_below: bool
    description: str

    @property
    def title(self) -> str:
        return f"{self.number} {self.recipe}: {self.description}{'; failed quality' if self.failed else ''}"


@dataclass(frozen=True)
class Scatter:
    """One plot at one size, in pixels. `front` are the points that no other beats, `steps` the line through them."""

    size: str
    width: int
    height: int
    left: float
    right: float
    top: float
    bottom: float
    x_name: str
    y_name: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    points: tuple[Point, ...]
    front: tuple[Point, ...]
    steps: str
    limit: float | None
    limit_label: str
    is_log: bool
    starts_at_zero: bool


@dataclass(frozen=True)
class Plot:
    """One pair of figures, laid out for each width."""

    title: str
    better: str
    about: str
    scatters: tuple[Scatter, ...]

    @property
    def wide(self) -> Scatter:
        return self.scatters[0]


@dataclass(frozen=True)
class Value:
    """A recipe's place in a plot: its speed and the other figure, each with its interval.

    Attributes:
        kind, failed: see `Point`.
        doubtful: whether its quality was judged and is unclear.
        said: both figures in words.
    """

    number: int
    recipe: str
    kind: Literal["baseline", "same", "changed"]
    failed: bool
    doubtful: bool
    x: Interval
    y: Interval
    description: str


@dataclass(frozen=True)
class Measure:
    """The figure on the vertical axis."""

    name: str
    unit: str
    larger_is_better: bool
    limit: float | None = None
    limit_label: str = ""


def plots(rows: Sequence[Row]) -> tuple[Plot, ...]:
    """Return speed against quality and speed against memory; a plot with fewer than two points is left out."""
    plots = [_quality_plot(rows), _memory_plot(rows)]
    return tuple(plot for plot in plots if plot is not None)


def _quality_plot(rows: Sequence[Row]) -> Plot | None:
    """Plot the share of the CLIP margin that is kept; SSIM if there is none, or if no recipe may change the image."""
    compared = [r for r in rows[1:] if r.latency is not None and r.fidelity is not None]
    all_same = all(r.record.trial.recipe.same_picture for r in compared)
    by_clip = [r for r in compared if r.fidelity is not None and r.fidelity.clip_kept is not None]
    by_ssim = [r for r in compared if r.fidelity is not None and r.fidelity.ssim is not None]
    limits = rows[0].limits
    if rows[0].latency is None:
        return None
    if by_clip and not (all_same and by_ssim):
        limit = limits.clip if isinstance(limits.clip, float) else None
        label = "" if limit is None else f"limit {100 * limit:g} %"
        measure = Measure("CLIP margin kept, %", "%", True, None if limit is None else 100 * limit, label)
        about = "the baseline’s margin between its own and other prompts is 100 %"
    elif by_ssim:
        limit, label = limits.ssim, "" if limits.ssim is None else f"limit {limits.ssim:g}"
        measure = Measure("SSIM to the baseline’s images", "", True, limit, label)
        about = "1 is the baseline’s image, pixel by pixel"
    else:
        return None
    measured = [(number, row) for number, row in enumerate(rows, 1) if row.latency is not None]
    values = []
    for number, row in measured:
        x, y = _speed(row, rows[0]), _quality(row, percent=measure.unit == "%")
        if x is not None and y is not None:
            values.append(_value(number, row, x, y, f"{x.point:.2f}×, {_quality_text(y, measure.unit)}"))
    return _plot("Speed and quality", "Upper right is better", about, values, measure)


def _memory_plot(rows: Sequence[Row]) -> Plot | None:
    """Plot peak memory; nothing where no baseline was measured."""
    measured = [
        (n, r, r.memory) for n, r in enumerate(rows, 1) if r.latency is not None and r.memory is not None
    ]
    values = []
    for number, row, memory in measured:
        x, y = _speed(row, rows[0]), Interval(float(memory.peak_bytes), None, None)
        if x is not None:
            values.append(_value(number, row, x, y, f"{x.point:.2f}×, {size(memory.peak_bytes)}"))
    return memory_plot(values)


def _speed(row: Row, baseline: Row) -> Interval | None:
    return Interval(1.0, None, None) if row is baseline and row.latency is not None else row.speedup


def _quality(row: Row, *, percent: bool) -> Interval | None:
    """Return the figure of a row; the baseline keeps all of its own quality."""
    if row.is_baseline:
        return Interval(100.0 if percent else 1.0, None, None)
    if row.fidelity is None:
        return None
    if not percent:
        return row.fidelity.ssim
    kept = row.fidelity.clip_kept
    if kept is None:
        return None
    ends = (None if end is None else 100 * end for end in (kept.low, kept.high))
    return Interval(100 * kept.point, *ends)


def _quality_text(value: Interval, unit: str) -> str:
    return f"CLIP kept {value.point:.1f} %" if unit else f"SSIM {value.point:.3f}"


def _value(number: int, row: Row, x: Interval, y: Interval, description: str) -> Value:
    is_doubtful = row.judgement is not None and row.judgement.gate == "unclear"
    return Value(number, row.recipe, _kind(row), row.failed_quality, is_doubtful, x, y, description)


def memory_plot(values: Sequence[Value]) -> Plot | None:
    """Plot speed against peak memory, the values' second figure, in bytes; None with fewer than two recipes."""
    peak = max((v.y.point for v in values), default=0.0)
    unit, factor = next(((u, f) for u, f in (("GB", 1e-9), ("MB", 1e-6)) if peak * f >= 1), ("kB", 1e-3))
    scaled = [replace(v, y=Interval(v.y.point * factor, None, None)) for v in values]
    return _plot(
        "Speed and memory", "Lower right is better", "", scaled, Measure(f"peak memory, {unit}", "", False)
    )


def _plot(title: str, better: str, about: str, values: Sequence[Value], measure: Measure) -> Plot | None:
    if len(values) < 2:
        return None
    scatters = tuple(_scatter(name, width, height, values, measure) for name, width, height in SIZES)
    return Plot(title, better, about, scatters)


def _scatter(name: str, width: int, height: int, values: Sequence[Value], measure: Measure) -> Scatter:
    left, right, top, bottom = _LEFT, width - _RIGHT, _TOP, height - _BOTTOM
    x_axis = Axis.of_ratios(_ends(v.x for v in values), left, right, num_ticks=max(4, width // 110))
    y_axis = _y_axis(values, measure, bottom, top)
    below = [v.y.point < y_axis.low for v in values]
    drawn = [
        (x_axis.position(v.x.point), bottom - _ARROW if cut else y_axis.position(v.y.point))
        for v, cut in zip(values, below, strict=True)
    ]
    x_bars = [_bar(x_axis, v.x) for v in values]
    y_bars = [None if cut else _bar(y_axis, v.y) for v, cut in zip(values, below, strict=True)]
    boxes = [(a[0], y - 1, a[1], y + 1) for a, (_, y) in zip(x_bars, drawn, strict=True) if a]
    boxes += [(x - 1, min(b), x + 1, max(b)) for b, (x, _) in zip(y_bars, drawn, strict=True) if b]
    inside: Box = (left, top, right, bottom)
    labels = place_labels([str(v.number) for v in values], drawn, boxes, inside)
    points = tuple(
        Point(
            number=v.number,
            recipe=v.recipe,
            kind=v.kind,
            failed=v.failed,
            doubtful=v.doubtful,
            x=x,
            y=y,
            left=None if x_bar is None else x_bar[0],
            right=None if x_bar is None else x_bar[1],
            lower=None if y_bar is None else y_bar[0],
            upper=None if y_bar is None else y_bar[1],
            label_x=label[0],
            label_y=label[1],
            has_leader=math.hypot(label[0] - x, label[1] - y) > 16,
            is_below=cut,
            description=v.description,
        )
        for v, (x, y), x_bar, y_bar, cut, label in zip(
            values, drawn, x_bars, y_bars, below, labels, strict=True
        )
    )
    passing = [i for i, v in enumerate(values) if not v.failed]
    sign = 1 if measure.larger_is_better else -1
    best = tuple(
        points[passing[i]] for i in front([(values[j].x.point, sign * values[j].y.point) for j in passing])
    )
    limit = measure.limit
    return Scatter(
        size=name, width=width, height=height, left=left, right=right, top=top, bottom=bottom,
        x_name="speed-up", y_name=measure.name, x_ticks=x_axis.ticks, y_ticks=y_axis.ticks, points=points,
        front=best, steps=_steps(best),
        limit=y_axis.position(limit) if limit is not None and y_axis.low <= limit <= y_axis.high else None,
        limit_label=measure.limit_label, is_log=x_axis.is_log, starts_at_zero=y_axis.starts_at_zero,
    )  # fmt: skip


def _kind(row: Row) -> Literal["baseline", "same", "changed"]:
    if row.is_baseline:
        return "baseline"
    return "same" if row.record.trial.recipe.same_picture else "changed"


def _ends(intervals: Iterable[Interval]) -> list[float]:
    return [end for i in intervals for end in (i.low, i.point, i.high) if end is not None]


def _y_axis(values: Sequence[Value], measure: Measure, bottom: float, top: float) -> Axis:
    """Return the vertical axis. On a quality axis a recipe that failed by far does not compress the others."""
    if not measure.larger_is_better:
        return Axis.over(_ends(v.y for v in values), bottom, top, num_ticks=5)
    unit = 100 if measure.unit else 1
    kept = _ends(v.y for v in values if not v.failed)
    kept += [] if measure.limit is None else [measure.limit]
    if sum(not v.failed for v in values) < 2:
        values_in_view = _ends(v.y for v in values)
    else:
        span = max(max(kept) - min(kept), _LEAST_SPAN * unit)
        near = [v.y for v in values if v.failed and v.y.point >= min(kept) - span]
        values_in_view = kept + _ends(near)
    values_in_view = [*values_in_view, max(values_in_view) - _LEAST_SPAN * unit]
    return Axis.over(values_in_view, bottom, top, num_ticks=5, may_start_at_zero=False)


def _bar(axis: Axis, interval: Interval) -> tuple[float, float] | None:
    if interval.low is None or interval.high is None:
        return None
    return axis.position(interval.low), axis.position(interval.high)


def _steps(best: Sequence[Point]) -> str:
    """Return the points of the line that goes down at each recipe and over to the next, faster one."""
    corners = [(best[0].x, best[0].y)] if best else []
    for before, after in pairwise(best):
        corners += [(before.x, after.y), (after.x, after.y)]
    return " ".join(f"{x},{y}" for x, y in corners)


def front(values: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the values that no other value beats, by the first figure.

    A value is beaten by one that is at least as large in both figures and larger in one.
    """
    kept = [
        i
        for i, (x, y) in enumerate(values)
        if not any(a >= x and b >= y and (a, b) != (x, y) for a, b in values)
    ]
    return sorted(kept, key=lambda i: (values[i][0], -values[i][1]))


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
    centres = []
    for text, point in zip(texts, points, strict=True):
        candidates = list(_around(point, 7.0 * len(text) + 3))
        # If nothing else is free a label may cross a bar, but never a dot or another label.
        for obstacles in ([*dots, *boxes, *bars], [*dots, *boxes], boxes):
            free = (b for b in candidates if _fits(b, inside) and not any(_overlap(b, o) for o in obstacles))
            box = next(free, None)
            if box is not None:
                break
        box = box or candidates[0]
        boxes.append(box)
        centres.append((round((box[0] + box[2]) / 2, 1), round((box[1] + box[3]) / 2, 1)))
    return centres


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
