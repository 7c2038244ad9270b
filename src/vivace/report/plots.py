"""Geometry of the bar charts: numbers that the templates draw as inline SVG.

All text in a chart is written by the autoescaping template. A chart so follows the page's colours and font, stays
sharp at any size, and cannot bypass the escaping. Bars are in percent of their box, so one layout fits every width.
`scatter` and `samples` are the other charts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vivace.answers.formatting import seconds
from vivace.foundation.stats import Interval
from vivace.report.rows import Row

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
        (len(fewer), index) for index, other in enumerate(above) if (fewer := _techniques(other)) < techniques
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
    """Return each measured recipe's time by stage. Stages that no row has are left out."""
    measured = [(i, r) for i, r in enumerate(rows, 1) if r.stages_s]
    longest = max((sum(r.stages_s.values()) for _, r in measured), default=0.0)
    if longest <= 0:
        return ()
    breakdowns = []
    for number, row in measured:
        # Known stages in the order of the call, then unknown stages of newer records.
        stages = [s for s in STAGES if s in row.stages_s] + sorted(set(row.stages_s) - set(STAGES))
        bars, start = [], 0.0
        for stage in stages:
            width = 100 * row.stages_s[stage] / longest
            bars.append(Bar(stage if stage in STAGES else "other", round(start, 2), round(width, 2)))
            start += width
        figures = tuple((stage, seconds(row.stages_s[stage])) for stage in stages)
        breakdowns.append(Breakdown(number, row.recipe, row.failed_quality, tuple(bars), figures))
    return tuple(breakdowns)
