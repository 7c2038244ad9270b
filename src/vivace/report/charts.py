"""The charts of a run as SVG files of their own: times of all recipes, and speed-up against quality and memory.

They have no scripts, no links and no fonts of their own. All text is escaped by the template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vivace.foundation.spec.recipe_syntax import short_form
from vivace.foundation.untrusted.streams import plain
from vivace.report.page import environment
from vivace.report.rows import Row
from vivace.report.scatter import plots
from vivace.report.summary import ratio, seconds
from vivace.report.value_text import shortened

_WIDTH = 820
_LABELS, _VALUES = 300, 180  # pixels beside the bars
_ROW, _HEAD = 30, 56
_KEY_ROW = 20


@dataclass(frozen=True)
class TimeBar:
    """A recipe's median time with its interval, in pixels."""

    number: int
    recipe: str
    kind: str
    y: float
    width: float
    low: float | None
    high: float | None
    text: str


def charts(rows: Sequence[Row]) -> dict[str, str]:
    """Return the charts of a run as SVG, by the name of their file; none if nothing was measured."""
    files = {}
    template = environment().get_template("chart.svg")
    if bars := time_bars(rows):
        files["times.svg"] = template.render(
            kind="times", title=_title(rows), width=_WIDTH, height=_HEAD + _ROW * len(bars) + 12, bars=bars,
            left=_LABELS, row=_ROW,
        )  # fmt: skip
    for plot in plots(rows):
        scatter = plot.wide
        name = "-".join(plot.title.lower().replace(",", " ").split())
        files[f"{name}.svg"] = template.render(
            kind="scatter", title=f"{_title(rows)}: {plot.title}", width=_WIDTH,
            height=max(scatter.height + _HEAD, _HEAD + 20 + _KEY_ROW * len(scatter.points)), plot=plot, c=scatter,
            recipes=[(point, _label(point.recipe)) for point in scatter.points], head=_HEAD, key_row=_KEY_ROW,
        )  # fmt: skip
    return files


def time_bars(rows: Sequence[Row]) -> list[TimeBar]:
    """Return a bar for each measured row, all on one scale."""
    measured = [
        (number, row, row.latency.median) for number, row in enumerate(rows, 1) if row.latency is not None
    ]
    if not measured:
        return []
    room = _WIDTH - _LABELS - _VALUES
    scale = room / max(median.high or median.point for _, _, median in measured)
    bars = []
    for index, (number, row, median) in enumerate(measured):
        speedup = "" if row.speedup is None else f", {ratio(row.speedup)}"
        failed = "; failed quality" if row.failed_quality else ""
        ends = (median.low, median.high)
        low, high = (None if end is None else round(_LABELS + end * scale, 1) for end in ends)
        kind = "baseline" if number == 1 else "failed" if row.failed_quality else "recipe"
        text = f"{seconds(median.point)}{speedup}{failed}"
        y = _HEAD + _ROW * index
        bars.append(
            TimeBar(number, _label(row.recipe), kind, y, round(median.point * scale, 1), low, high, text)
        )
    return bars


def _title(rows: Sequence[Row]) -> str:
    return plain(f"{rows[0].model} on {rows[0].record.environment.device_name}")


def _label(recipe: str) -> str:
    return plain(shortened(short_form(recipe)))
