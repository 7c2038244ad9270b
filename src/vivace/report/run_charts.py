"""The charts of a comparison: times, what each recipe saves, where the time goes, every call, and trade-offs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from vivace.answers.answer import Bar, BarPart, Bars, Plot, PlotPoint
from vivace.answers.formatting import ratio, seconds, shorten, size
from vivace.foundation.spec.recipe_syntax import short_form
from vivace.foundation.stats import Interval
from vivace.report.latency import Latency
from vivace.report.rows import Row

_STAGES = {
    "text": "text encoding",
    "steps": "denoising steps",
    "vae": "VAE decoding",
    "other": "everything else",
}
_LEAST_SPAN = 0.05
"""Quality axes cover at least this much, so that noise does not look like a difference."""
_SCALES = (0.02, 0.05, 0.1, 0.2, 0.5)
_WITHIN = 0.97  # share of all calls that the scale holds
_FRONT = (
    "The line is the Pareto front: no other recipe is better in both figures than one on it, by the points alone; "
    "recipes that failed on quality are hollow and do not count. Circles keep the image, diamonds change it. Bars are "
    "95 % intervals."
)

Numbered = tuple[int, Row, Latency]


def charts_of(rows: Sequence[Row]) -> list[Bars | Plot]:
    """Return the charts of a comparison, the baseline first; those with nothing to show are left out."""
    charts = (*plots(rows), waterfall(rows), stages(rows), calls(rows))
    return [chart for chart in charts if chart is not None]


def _measured(rows: Sequence[Row]) -> list[Numbered]:
    return [(n, row, row.latency) for n, row in enumerate(rows, 1) if row.latency is not None]


def _failed(row: Row) -> str:
    return "failed quality" if row.failed_quality else ""


def times(rows: Sequence[Row]) -> Bars | None:
    bars = []
    for number, row, latency in _measured(rows):
        median = latency.median
        speedup = "" if row.speedup is None else f", {ratio(row.speedup)}"
        failed = "; failed quality" if row.failed_quality else ""
        look = "total" if number == 1 else "loss" if row.failed_quality else "saving"
        bars.append(
            Bar(
                shorten(short_form(row.recipe)),
                f"{seconds(median.point)}{speedup}{failed}",
                number,
                parts=(BarPart(0.0, median.point, look),),
                marks=tuple(end for end in (median.low, median.high) if end is not None),
            )
        )
    return Bars("Times", tuple(bars), "Median seconds per image with 95 % intervals") if bars else None


def waterfall(rows: Sequence[Row]) -> Bars | None:
    """Return the changes of measured rows' times; None with fewer than two.

    A bar is the change against the recipe that the row extends: the one above with most of its techniques and no other,
    or else the baseline. It is `unclear` if the two intervals overlap.
    """
    measured = _measured(rows)
    if len(measured) < 2:
        return None
    bars: list[Bar] = []
    for number, row, latency in measured:
        after, above = latency.median, measured[: len(bars)]
        if not above:
            total = BarPart(0.0, after.point, "total")
            bars.append(Bar(row.recipe, seconds(after.point), number, note=_failed(row), parts=(total,)))
            continue
        parent, _, of_parent = max(reversed(above), key=lambda other: _num_shared(other[1], row))
        before, is_next = of_parent.median, parent == above[-1][0]
        part = BarPart(min(before.point, after.point), abs(after.point - before.point), _look(before, after))
        below = f"to {seconds(after.point)}" + ("" if is_next else f", from row {parent}")
        marks = (before.point,) if is_next else ()
        bars.append(Bar(row.recipe, change_text(before, after), number, below, _failed(row), (part,), marks))
    about = (
        "Seconds per image. Each bar is the change against the recipe that it extends: the row above, or the row that "
        "is named."
    )
    legend = (("saving", "saved"), ("loss", "lost"), ("unclear", "the two intervals overlap"))
    return Bars("Time, row by row", tuple(bars), about, legend)


def _num_shared(other: Row, row: Row) -> tuple[int, int]:
    """Return how many of a row's techniques another has, of several the last; none unless it has no other ones."""
    fewer, techniques = (
        {call.model_dump_json() for call in each.record.trial.recipe.techniques} for each in (other, row)
    )
    return (len(fewer), 1) if fewer < techniques else (0, int(other.is_baseline))


def _look(before: Interval, after: Interval) -> str:
    ends = (before.low, before.high, after.low, after.high)
    if None in ends or (after.low <= before.high and before.low <= after.high):  # type: ignore[operator]
        return "unclear"
    return "saving" if after.point < before.point else "loss"


def change_text(before: Interval, after: Interval) -> str:
    """Return a change of time in the unit and with the digits of the times around it, so that they can be added up."""
    difference = after.point - before.point
    sign = "−" if difference < 0 else "+"
    unit, factor = ("ms", 1e3) if before.point < 0.1 else ("s", 1.0)
    decimals = max(0, 2 - math.floor(math.log10(before.point * factor)))
    percent = abs(round(100 * difference / before.point))
    return f"{sign}{abs(difference) * factor:.{decimals}f} {unit} ({sign}{percent} %)"


def stages(rows: Sequence[Row]) -> Bars | None:
    """Return each measured recipe's time by stage, on one scale. Stages that no row has are left out."""
    bars = []
    for number, row, _ in _measured(rows):
        # Known stages in the order of the call, then unknown stages of newer records.
        names = [s for s in _STAGES if s in row.stages_s] + sorted(set(row.stages_s) - set(_STAGES))
        ends = list(accumulate((row.stages_s[stage] for stage in names), initial=0.0))
        parts = tuple(
            BarPart(start, row.stages_s[stage], f"stage-{stage if stage in _STAGES else 'other'}")
            for stage, start in zip(names, ends, strict=False)
        )
        each = ", ".join(f"{stage} {seconds(row.stages_s[stage])}" for stage in names)
        if ends[-1]:
            bars.append(Bar(row.recipe, seconds(ends[-1]), number, each, _failed(row), parts))
    about = "Median seconds per image of each stage of a call, on one scale."
    legend = tuple((f"stage-{stage}", name) for stage, name in _STAGES.items())
    return Bars("Where the time goes", tuple(bars), about, legend) if bars else None


def calls(rows: Sequence[Row]) -> Bars | None:
    """Return every timed call in order, so that outliers and drift are visible; None without two calls of a recipe.

    All recipes share one scale, in percent of their own time: an unsteady recipe looks unsteady at any speed.
    """
    measured = _measured(rows)
    if not any(latency.n > 1 for *_, latency in measured):
        return None
    every = [
        [sample / latency.median.point - 1 for samples in latency.samples_s for sample in samples]
        for *_, latency in measured
    ]
    deviations = sorted(abs(deviation) for of in every for deviation in of)
    usual = deviations[min(len(deviations) - 1, int(_WITHIN * len(deviations)))]
    reach = next((s for s in _SCALES if s >= usual), _SCALES[-1])
    bars = []
    for (number, row, latency), of in zip(measured, every, strict=True):
        below = f"calls {_signed(min(of))} to {_signed(max(of))}"
        if len(latency.samples_s) > 1:
            below += f"; rounds {', '.join(seconds(statistics.median(of)) for of in latency.samples_s)}"
        middle = seconds(latency.median.point)
        bars.append(Bar(row.recipe, middle, number, below, _failed(row), samples=latency.samples_s))
    about = (
        "Each dot is a timed call, in order and round by round; the line of a round is its median. Up is slower: a box "
        f"reaches from −{100 * reach:.0f} % to +{100 * reach:.0f} % of the recipe’s own time; squares at its edge lie "
        "beyond. A slope is drift; single dots far off are disturbances."
    )
    return Bars("Every timed call", tuple(bars), about, reach=reach)


def _signed(share: float) -> str:
    percent = round(100 * share)
    return f"{'−' if percent < 0 else '+'}{abs(percent)} %"


def plots(rows: Sequence[Row]) -> list[Plot]:
    """Return speed against quality and speed against memory; a plot with fewer than two points is left out."""
    candidates = [_quality_plot(rows), memory_plot(_memory_points(rows))]
    return [plot for plot in candidates if plot is not None]


def _quality_plot(rows: Sequence[Row]) -> Plot | None:
    """Plot the share of the CLIP margin that is kept; SSIM if there is none, or if no recipe may change the image."""
    compared = [r for r in rows[1:] if r.latency is not None and r.fidelity is not None]
    all_same = all(r.record.trial.recipe.same_picture for r in compared)
    has_clip = any(r.fidelity.clip_kept for r in compared if r.fidelity)
    has_ssim = any(r.fidelity.ssim for r in compared if r.fidelity)
    if not rows or rows[0].latency is None or not (has_clip or has_ssim):
        return None
    limits, is_clip = rows[0].limits, has_clip and not (all_same and has_ssim)
    limit, name, about = (
        limits.ssim,
        "SSIM to the baseline’s images",
        "1 is the baseline’s image, pixel by pixel.",
    )
    if is_clip:
        limit = 100 * limits.clip if isinstance(limits.clip, float) else None
        name, about = (
            "CLIP margin kept, %",
            "The baseline’s margin between its own and other prompts is 100 %.",
        )
    unit = " %" if is_clip else ""
    points = []
    for number, row, _ in _measured(rows):
        y = _quality(row, is_clip=is_clip)
        if y is not None:
            said = f"CLIP kept {y.point:.1f} %" if is_clip else f"SSIM {y.point:.3f}"
            points += _point(number, row, y, said)
    if len(points) < 2:
        return None
    return Plot(
        "Speed and quality",
        "speed-up",
        name,
        tuple(points),
        about=f"Upper right is better. {about} {_FRONT}",
        y_unit=unit.strip(),
        limits=() if limit is None else ((limit, f"limit {limit:g}{unit}"),),
        better="more",
        is_ratio=True,
        least_span=_LEAST_SPAN * (100 if is_clip else 1),
    )


def _memory_points(rows: Sequence[Row]) -> list[PlotPoint]:
    return [
        point
        for number, row, _ in _measured(rows)
        if row.memory is not None
        for point in _point(
            number, row, Interval(float(row.memory.peak_bytes), None, None), size(row.memory.peak_bytes)
        )
    ]


def memory_plot(points: Sequence[PlotPoint]) -> Plot | None:
    """Plot speed against peak memory, the points' second figure, in bytes; None with fewer than two."""
    if len(points) < 2:
        return None
    peak = max(point.y.point for point in points)
    unit, factor = next(((u, f) for u, f in (("GB", 1e-9), ("MB", 1e-6)) if peak * f >= 1), ("kB", 1e-3))
    scaled = tuple(replace(point, y=Interval(point.y.point * factor, None, None)) for point in points)
    return Plot(
        "Speed and memory",
        "speed-up",
        f"peak memory, {unit}",
        scaled,
        about=f"Lower right is better. {_FRONT}",
        better="less",
        is_ratio=True,
    )


def _quality(row: Row, *, is_clip: bool) -> Interval | None:
    """Return the figure of a row; the baseline keeps all of its own quality."""
    if row.is_baseline:
        return Interval(100.0 if is_clip else 1.0, None, None)
    if row.fidelity is None or not is_clip:
        return None if row.fidelity is None else row.fidelity.ssim
    kept = row.fidelity.clip_kept
    if kept is None:
        return None
    low, high = (None if end is None else 100 * end for end in (kept.low, kept.high))
    return Interval(100 * kept.point, low, high)


def _point(number: int, row: Row, y: Interval, said: str) -> list[PlotPoint]:
    x = Interval(1.0, None, None) if row.is_baseline else row.speedup
    if x is None:
        return []
    look = "baseline" if row.is_baseline else "same" if row.record.trial.recipe.same_picture else "changed"
    failed = "; failed quality" if row.failed_quality else ""
    label = f"{number} {row.recipe}: {x.point:.2f}×, {said}{failed}"
    return [PlotPoint(x, y, look, label, number, row.recipe, row.failed_quality)]
