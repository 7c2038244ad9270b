"""The charts of a comparison: times, what each recipe saves, where the time goes, every call, and trade-offs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from vivace.answers.answer import Bar, BarPart, Bars, Plot, PlotPoint
from vivace.answers.formatting import ratio, seconds, shorten, size
from vivace.foundation.spec.recipe_syntax import short_form
from vivace.foundation.stats import Interval
from vivace.report.rows import Row

STAGES = ("text", "steps", "vae", "other")
_STAGE_NAMES = (
    ("stage-text", "text encoding"),
    ("stage-steps", "denoising steps"),
    ("stage-vae", "VAE decoding"),
    ("stage-other", "everything else"),
)
_LEAST_SPAN = 0.05
"""Quality axes cover at least this much, so that noise does not look like a difference."""
_EDGE, _GAP = 9.0, 2.4  # percent of a box: between the scale's end and the box's, and between two rounds
_SCALES = (0.02, 0.05, 0.1, 0.2, 0.5)
_WITHIN = 0.97  # share of all calls that the scale holds
_MAX_DOTS = 400  # of a recipe
_FRONT = (
    "The line is the Pareto front: no other recipe is better in both figures than one on it, by the points alone; "
    "recipes that failed on quality are hollow and do not count. Circles keep the image, diamonds change it. Bars are "
    "95 % intervals."
)

Numbered = tuple[int, Row, Interval]


def charts_of(rows: Sequence[Row]) -> list[Bars | Plot]:
    """Return the charts of a comparison, the baseline first; those with nothing to show are left out."""
    charts = (*plots(rows), waterfall(rows), stages(rows), calls(rows))
    return [chart for chart in charts if chart is not None]


def _measured(rows: Sequence[Row]) -> list[Numbered]:
    return [(n, row, row.latency.median) for n, row in enumerate(rows, 1) if row.latency is not None]


def _failed(row: Row) -> str:
    return "failed quality" if row.failed_quality else ""


def times(rows: Sequence[Row]) -> Bars | None:
    """Return each measured row's median time with its interval; None without any."""
    measured = _measured(rows)
    if not measured:
        return None
    scale = 100 / max(median.high or median.point for _, _, median in measured)
    bars = []
    for number, row, median in measured:
        speedup = "" if row.speedup is None else f", {ratio(row.speedup)}"
        failed = "; failed quality" if row.failed_quality else ""
        ends = () if median.low is None or median.high is None else (median.low * scale, median.high * scale)
        look = "total" if number == 1 else "loss" if row.failed_quality else "saving"
        bars.append(
            Bar(
                shorten(short_form(row.recipe)),
                f"{seconds(median.point)}{speedup}{failed}",
                number,
                parts=(BarPart(0.0, round(median.point * scale, 2), look),),
                marks=tuple(round(end, 2) for end in ends),
            )
        )
    return Bars("Times", tuple(bars), "Median seconds per image with 95 % intervals")


def waterfall(rows: Sequence[Row]) -> Bars | None:
    """Return the changes of measured rows' times; None with fewer than two.

    A bar is the change against the recipe that the row extends: the one above with most of its techniques and no other,
    or else the baseline. It is `unclear` if the two intervals overlap.
    """
    measured = _measured(rows)
    if len(measured) < 2:
        return None
    scale = 100 / max(median.point for _, _, median in measured)
    number, row, median = measured[0]
    total = BarPart(0.0, round(median.point * scale, 2), "total")
    bars = [Bar(row.recipe, seconds(median.point), number, note=_failed(row), parts=(total,))]
    for index, (number, row, after) in enumerate(measured[1:]):
        parent = _parent([other for _, other, _ in measured[: index + 1]], row)
        above, _, before = measured[parent]
        start, end = round(before.point * scale, 2), round(after.point * scale, 2)
        part = BarPart(min(start, end), round(abs(end - start), 2), _change_kind(before, after))
        of = "" if parent == index else f", from row {above}"
        below = f"to {seconds(after.point)}{of}"
        bars.append(
            Bar(
                row.recipe,
                change_text(before, after),
                number,
                below,
                _failed(row),
                (part,),
                (start,) if parent == index else (),
            )
        )
    about = (
        "Seconds per image. Each bar is the change against the recipe that it extends: the row above, or the row that "
        "is named."
    )
    legend = (("saving", "saved"), ("loss", "lost"), ("unclear", "the two intervals overlap"))
    return Bars("Time, row by row", tuple(bars), about, legend)


def _parent(above: Sequence[Row], row: Row) -> int:
    """Return the index of the row above that this one extends; 0, the baseline, if it extends no other."""
    techniques = _techniques(row)
    nested = [
        (len(fewer), index) for index, other in enumerate(above) if (fewer := _techniques(other)) < techniques
    ]
    return max(nested, default=(0, 0))[1]


def _techniques(row: Row) -> set[str]:
    return {call.model_dump_json() for call in row.record.trial.recipe.techniques}


def _change_kind(before: Interval, after: Interval) -> str:
    if before.low is None or before.high is None or after.low is None or after.high is None:
        return "unclear"
    if after.low <= before.high and before.low <= after.high:
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
    measured = [(number, row) for number, row in enumerate(rows, 1) if row.stages_s]
    longest = max((sum(row.stages_s.values()) for _, row in measured), default=0.0)
    if longest <= 0:
        return None
    bars = []
    for number, row in measured:
        # Known stages in the order of the call, then unknown stages of newer records.
        names = [s for s in STAGES if s in row.stages_s] + sorted(set(row.stages_s) - set(STAGES))
        parts, start = [], 0.0
        for stage in names:
            width = 100 * row.stages_s[stage] / longest
            look = f"stage-{stage if stage in STAGES else 'other'}"
            parts.append(BarPart(round(start, 2), round(width, 2), look))
            start += width
        each = ", ".join(f"{stage} {seconds(row.stages_s[stage])}" for stage in names)
        whole = seconds(sum(row.stages_s.values()))
        bars.append(Bar(row.recipe, whole, number, each, _failed(row), tuple(parts)))
    about = "Median seconds per image of each stage of a call, on one scale."
    return Bars("Where the time goes", tuple(bars), about, _STAGE_NAMES)


def calls(rows: Sequence[Row]) -> Bars | None:
    """Return every timed call in order, so that outliers and drift are visible; None without two calls of a recipe.

    All recipes share one scale, in percent of their own time: an unsteady recipe looks unsteady at any speed.
    """
    measured = [(n, row, row.latency) for n, row in enumerate(rows, 1) if row.latency is not None]
    if not any(latency.n > 1 for *_, latency in measured):
        return None
    deviations = sorted(
        abs(sample / latency.median.point - 1)
        for *_, latency in measured
        for samples in latency.samples_s
        for sample in samples
    )
    reach = deviations[min(len(deviations) - 1, int(_WITHIN * len(deviations)))]
    scale = next((s for s in _SCALES if s >= reach), _SCALES[-1])
    bars = tuple(
        _calls_of(number, row, latency.median.point, latency.samples_s, scale)
        for number, row, latency in measured
    )
    about = (
        "Each dot is a timed call, in order and round by round; the line of a round is its median. Up is slower: a box "
        f"reaches from −{100 * scale:.0f} % to +{100 * scale:.0f} % of the recipe’s own time; squares at its edge lie "
        "beyond. A slope is drift; single dots far off are disturbances."
    )
    return Bars("Every timed call", bars, about)


def _calls_of(number: int, row: Row, middle_s: float, rounds: Sequence[Sequence[float]], scale: float) -> Bar:
    def deviation(time_s: float) -> float:
        return time_s / middle_s - 1

    def y(time_s: float) -> float:
        return round(50 - max(-1.0, min(1.0, deviation(time_s) / scale)) * (50 - _EDGE), 1)

    shown = _downsample(rounds)
    width = (100 - _GAP * (len(shown) - 1)) / sum(map(len, shown))
    dots: list[tuple[float, float, bool]] = []
    levels, start = [], 0.0
    for samples, few in zip(rounds, shown, strict=True):
        dots += [
            (round(start + (k + 0.5) * width, 2), y(time_s), abs(deviation(time_s)) > scale)
            for k, time_s in enumerate(few)
        ]
        end = start + width * len(few)
        levels.append((round(start, 2), round(end, 2), y(statistics.median(samples))))
        start = end + _GAP
    every = [time_s for samples in rounds for time_s in samples]
    spread = f"calls {_signed(deviation(min(every)))} to {_signed(deviation(max(every)))}"
    by_round = ", ".join(seconds(statistics.median(samples)) for samples in rounds)
    return Bar(
        row.recipe,
        seconds(middle_s),
        number,
        spread + (f"; rounds {by_round}" if len(rounds) > 1 else ""),
        _failed(row),
        dots=tuple(dots),
        levels=tuple(levels),
    )


def _downsample(rounds: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """Return the rounds' calls; if there are very many, the slowest and the fastest of every few neighbours."""
    every = -(-2 * sum(map(len, rounds)) // _MAX_DOTS)
    if every <= 2:
        return list(rounds)
    thin: list[Sequence[float]] = []
    for samples in rounds:
        few: list[float] = []
        for start in range(0, len(samples), every):
            some = samples[start : start + every]
            few += [some[i] for i in sorted({some.index(min(some)), some.index(max(some))})]
        thin.append(few)
    return thin


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
    has_clip = any(r.fidelity is not None and r.fidelity.clip_kept is not None for r in compared)
    has_ssim = any(r.fidelity is not None and r.fidelity.ssim is not None for r in compared)
    if not rows or rows[0].latency is None or not (has_clip or has_ssim):
        return None
    limits, is_clip = rows[0].limits, has_clip and not (all_same and has_ssim)
    if is_clip:
        limit = 100 * limits.clip if isinstance(limits.clip, float) else None
        name, about = (
            "CLIP margin kept, %",
            "The baseline’s margin between its own and other prompts is 100 %.",
        )
    else:
        limit = limits.ssim
        name, about = "SSIM to the baseline’s images", "1 is the baseline’s image, pixel by pixel."
    points = []
    for number, row, _ in _measured(rows):
        x, y = _speed(row, rows[0]), _quality(row, is_clip=is_clip)
        if x is not None and y is not None:
            said = f"CLIP kept {y.point:.1f} %" if is_clip else f"SSIM {y.point:.3f}"
            points.append(_point(number, row, x, y, said))
    if len(points) < 2:
        return None
    return Plot(
        "Speed and quality",
        "speed-up",
        name,
        tuple(points),
        about=f"Upper right is better. {about} {_FRONT}",
        y_unit="%" if is_clip else "",
        limits=() if limit is None else ((limit, f"limit {limit:g}{' %' if is_clip else ''}"),),
        better="more",
        is_ratio=True,
        least_span=_LEAST_SPAN * (100 if is_clip else 1),
    )


def _memory_points(rows: Sequence[Row]) -> list[PlotPoint]:
    points = []
    for number, row, _ in _measured(rows):
        x = _speed(row, rows[0])
        if x is not None and row.memory is not None:
            peak = Interval(float(row.memory.peak_bytes), None, None)
            points.append(_point(number, row, x, peak, size(row.memory.peak_bytes)))
    return points


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


def _speed(row: Row, baseline: Row) -> Interval | None:
    return Interval(1.0, None, None) if row is baseline and row.latency is not None else row.speedup


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


def _point(number: int, row: Row, x: Interval, y: Interval, said: str) -> PlotPoint:
    look = "baseline" if row.is_baseline else "same" if row.record.trial.recipe.same_picture else "changed"
    failed = "; failed quality" if row.failed_quality else ""
    label = f"{number} {row.recipe}: {x.point:.2f}×, {said}{failed}"
    return PlotPoint(x, y, look, label, number, row.recipe, row.failed_quality)
