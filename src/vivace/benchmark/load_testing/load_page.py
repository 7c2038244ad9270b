"""Loads as one offline HTML file: the table, and each request of each load by when it was due."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from markupsafe import Markup

from vivace import __version__
from vivace.benchmark.load_testing.load_report import HEADINGS, cells, compared, groups_of, notes, title
from vivace.benchmark.load_testing.load_rows import DONE, LoadRow
from vivace.foundation.untrusted.streams import plain
from vivace.report.page import environment, policy_for, sorting_script, style_sheet
from vivace.report.scatter import Axis

_WIDTH, _HEIGHT = 480, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 8, 28


@dataclass(frozen=True)
class Dot:
    """A request. `look` is "good", "late" or "failed"."""

    x: float
    y: float
    look: str
    label: str


@dataclass(frozen=True)
class LoadChart:
    """Seconds of each request by when it was due; `limits` are the heights of the SLO's lines."""

    name: str
    x: Axis
    y: Axis
    dots: tuple[Dot, ...]
    limits: tuple[float, ...]


def page_of(rows: Sequence[LoadRow], others: Sequence[LoadRow], command: str) -> str:
    """Return the page as HTML.

    Args:
        others: what they are compared with.
        command: the command line that repeats it.
    """
    own = (
        resources.files("vivace.benchmark.load_testing").joinpath("templates", "load.css").read_text("utf-8")
    )
    style, script = style_sheet() + own, sorting_script()
    return (
        environment("vivace.benchmark.load_testing")
        .get_template("load.html")
        .render(
            title=title(rows),
            began=rows[0].began,
            headings=HEADINGS,
            lines=[cells(group) for group in groups_of(rows)],
            charts=[chart_of(row) for row in rows if row.samples.due_s],
            width=_WIDTH,
            height=_HEIGHT,
            left=_LEFT,
            right=_WIDTH - _RIGHT,
            bottom=_HEIGHT - _BOTTOM,
            notes=[*notes(rows), *compared(rows, others)],
            command=plain(command),
            version=__version__,
            style=Markup(style),
            script=Markup(script),
            policy=Markup(policy_for(style, script)),
        )
    )


def chart_of(row: LoadRow) -> LoadChart:
    """Return the chart of a load with at least one request."""
    samples = row.samples
    seconds = [end - due for due, end in zip(samples.due_s, samples.ended_s, strict=True)]
    limits = sorted(set(row.slo_s))
    x = Axis.over([0.0, max(samples.due_s)], _LEFT, _WIDTH - _RIGHT, num_ticks=6, unit=" s")
    y = Axis.over([0.0, *seconds, *limits], _HEIGHT - _BOTTOM, _TOP, num_ticks=4, unit=" s")
    dots = tuple(
        Dot(
            x.position(due),
            y.position(took),
            _look(row, outcome, variant, took),
            f"{took:.3g} s" if outcome == DONE else plain(outcome),
        )
        for due, took, outcome, variant in zip(
            samples.due_s, seconds, samples.outcome, samples.variant, strict=True
        )
    )
    return LoadChart(row.stage.name, x, y, dots, tuple(y.position(limit) for limit in limits))


def _look(row: LoadRow, outcome: str, variant: int, seconds: float) -> str:
    if outcome != DONE:
        return "failed"
    return "late" if row.slo_s and seconds > row.slo_s[variant] else "good"
