"""Figures of loads as a table, Markdown, CSV or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from vivace.benchmark.load_testing.load_figures import figures_of, latency_ratio, throughput_ratio
from vivace.benchmark.load_testing.load_rows import LoadRow
from vivace.foundation.stats.intervals import Interval
from vivace.foundation.untrusted.terminal_text import plain
from vivace.report.text_table import TextTable, csv_text

HEADINGS = ("load", "requests", "images/s", "p50 s", "p95 s", "p99 s", "within SLO", "goodput/s", "errors")
_INTERVAL_FIELDS = tuple(
    f"{name}{end}"
    for name in ("throughput", "p50_s", "p95_s", "p99_s", "within_slo", "goodput")
    for end in ("", "_low", "_high")
)
_CSV_FIELDS = ("label", "load", "rate", "requests", "done", *_INTERVAL_FIELDS, "errors")
_LATE = 0.05
"""Share of the median latency by which requests may leave late without a note."""


def render(rows: Sequence[LoadRow], format_: str) -> str:
    """Return the figures of rows as text.

    Args:
        format_: "table", "md", "csv" or "json".
    """
    if format_ == "json":
        return json.dumps([as_dict(row) for row in rows], indent=2) + "\n"
    if format_ == "csv":
        return csv_text(_CSV_FIELDS, [_csv_row(row) for row in rows])
    table = TextTable(HEADINGS, [cells(row) for row in rows], left=frozenset(HEADINGS))
    return "\n".join(table.markdown() if format_ == "md" else table.aligned()) + "\n"


def title(rows: Sequence[LoadRow]) -> str:
    """Return a line with the server, the model and the SLO."""
    row = rows[0]
    sizes = sorted({size for size, _ in row.request.variants if size is not None})
    parts = [row.label, row.request.model or "", ", ".join(sizes)]
    recipe = row.server.get("recipe")
    parts += [str(recipe)] if isinstance(recipe, str) else []
    parts += [f"{name}={value}" for name, value in row.request.fields.items()]
    slo = sorted({round(each, 3) for each in rows[-1].slo_s})
    limit = f"; in time: {' or '.join(f'{each:g} s' for each in slo)}" if slo else ""
    return plain(", ".join(part for part in parts if part) + limit)


def notes(rows: Sequence[LoadRow]) -> list[str]:
    """Return notes on the figures."""
    texts = []
    for row in rows:
        figures = figures_of(row)
        middle = figures.latency_s.get(50)
        if row.rate is not None and middle is not None and figures.lag_s > _LATE * middle.point:
            texts.append(
                f"{row.stage.name}: requests left up to {figures.lag_s:.3f} s late, since this machine is too busy; "
                "latency counts from when they were due"
            )
    lone = figures_of(rows[0])
    if lone.phases_ms:
        phases = ", ".join(f"{plain(name)} {value:.1f}" for name, value in lone.phases_ms.items())
        texts.append(f"the server's own phases, one client, medians in ms: {phases}")
    return texts


def compared(rows: Sequence[LoadRow], others: Sequence[LoadRow]) -> list[str]:
    """Return a line for each common load with each of the other servers."""
    lines = []
    for label in dict.fromkeys(other.label for other in others):
        for row in rows:
            other = next((o for o in others if o.label == label and o.stage == row.stage), None)
            if other is None:
                continue
            what = [
                f"{name} {_ratio(interval)}"
                for name, interval in (
                    ("images/s", throughput_ratio(row, other)),
                    ("p50", latency_ratio(row, other)),
                )
                if interval is not None
            ]
            same = "" if other.request == row.request else " (other requests)"
            lines.append(plain(f"{row.stage.name}, over {label}{same}: {', '.join(what) or 'no image'}"))
    return lines


def as_dict(row: LoadRow) -> dict[str, Any]:
    """Return the figures of a row as plain data."""
    figures = figures_of(row)
    return {
        "label": row.label,
        "load": row.stage.name,
        "stage": row.stage.model_dump(exclude_none=True),
        "rate": row.rate,
        "slo_s": list(row.slo_s),
        "requests": figures.num_requests,
        "done": figures.num_done,
        "errors": figures.errors,
        "throughput": _numbers(figures.throughput),
        "latency_s": {f"p{percent}": _numbers(each) for percent, each in figures.latency_s.items()},
        "within_slo": _numbers(figures.within_slo),
        "goodput": _numbers(figures.goodput),
        "lag_s": figures.lag_s,
        "phases_ms": figures.phases_ms,
        "request": row.request.model_dump(mode="json"),
        "server": row.server,
        "began": row.began,
    }


def cells(row: LoadRow) -> tuple[str, ...]:
    """Return the figures of a row as text, below `HEADINGS`."""
    figures = figures_of(row)
    rate = "" if row.rate is None else f" ({row.rate:.3g}/s)"
    errors = ", ".join(f"{number} {plain(kind)}" for kind, number in figures.errors.items())
    return (
        row.stage.name + rate,
        str(figures.num_requests),
        figure_text(figures.throughput),
        *(figure_text(figures.latency_s[p]) if figures.latency_s else "" for p in (50, 95, 99)),
        "" if figures.within_slo is None else figure_text(figures.within_slo, percent=True),
        "" if figures.goodput is None else figure_text(figures.goodput),
        errors or "none",
    )


def figure_text(interval: Interval, *, percent: bool = False) -> str:
    """Return a figure with its interval: three digits that count."""
    values = [interval.point, interval.low, interval.high]
    texts = ["" if v is None else f"{100 * v:.0f}" if percent else f"{v:.3g}" for v in values]
    unit = " %" if percent else ""
    return f"{texts[0]}{unit}" if interval.low is None else f"{texts[0]} [{texts[1]}, {texts[2]}]{unit}"


def _ratio(interval: Interval) -> str:
    between = "" if interval.low is None else f" [{interval.low:.2f}, {interval.high:.2f}]"
    return f"{interval.point:.2f}x{between}"


def _numbers(interval: Interval | None) -> list[float | None] | None:
    return None if interval is None else [interval.point, interval.low, interval.high]


def _csv_row(row: LoadRow) -> dict[str, object]:
    figures = figures_of(row)
    latency = [figures.latency_s.get(p) for p in (50, 95, 99)]
    intervals = (figures.throughput, *latency, figures.within_slo, figures.goodput)
    numbers = [number for interval in intervals for number in _numbers(interval) or [None] * 3]
    return {
        "label": plain(row.label),
        "load": row.stage.name,
        "rate": row.rate,
        "requests": figures.num_requests,
        "done": figures.num_done,
        **dict(zip(_INTERVAL_FIELDS, numbers, strict=True)),
        "errors": "; ".join(f"{number} {plain(kind)}" for kind, number in figures.errors.items()),
    }
