"""Figures of loads as a table, Markdown, CSV or JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vivace.benchmark.load_testing.load_rows import DONE, LoadRow, LoadStage
from vivace.foundation.untrusted.streams import plain
from vivace.report.text_table import TextTable, csv_text

HEADINGS = ("load", "requests", "images/s", "p50 s", "p95 s", "p99 s", "within SLO", "goodput/s", "errors")
_CSV_FIELDS = (
    *("label", "load", "repeat", "rate", "requests", "done"),
    *("throughput", "p50_s", "p95_s", "p99_s", "within_slo", "goodput", "errors"),
)
_LATE = 0.05
"""Share of the median latency by which requests may leave late without a note."""
PERCENTILES = (50, 90, 95, 99)
_SETTLING = 0.1
"""Share of the time of Poisson arrivals that is left out at its beginning: the queue is empty then."""


# Figures of a load come without intervals: in a queue each request depends on those before it, and near the capacity
# for longer than a load lasts, so a single load cannot say how far another's figures would be from its own. Repeated
# loads show it.
@dataclass(frozen=True)
class LoadFigures:
    """Figures of a load.

    Attributes:
        num_requests: that were due; `num_done` brought an image, `errors` counts the others by kind.
        throughput: images a second.
        latency_s: seconds by percentile, of all requests: those without an image count as infinitely long.
        within_slo: the share of all requests whose image came in time; None without an SLO.
        goodput: images a second that came in time, of Poisson arrivals; None for others.
        lag_s: the 99th percentile of how much later than due requests left: what the load itself adds to latency.
        phases_ms: medians of the server's own Server-Timing.
    """

    num_requests: int
    num_done: int
    errors: dict[str, int]
    throughput: float
    latency_s: dict[int, float]
    within_slo: float | None
    goodput: float | None
    lag_s: float
    phases_ms: dict[str, float]


def render(rows: Sequence[LoadRow], format_: str) -> str:
    """Return the figures of rows as text.

    Args:
        format_: "table", "md", "csv" or "json".
    """
    if format_ == "json":
        return json.dumps([as_dict(row) for row in rows], indent=2) + "\n"
    if format_ == "csv":
        return csv_text(_CSV_FIELDS, [_csv_row(row) for row in rows])
    table = TextTable(HEADINGS, [cells(group) for group in groups_of(rows)], left=frozenset(HEADINGS))
    return "\n".join(table.markdown() if format_ == "md" else table.aligned()) + "\n"


def groups_of(rows: Sequence[LoadRow]) -> list[list[LoadRow]]:
    """Return the rows by load, each with its repeats."""
    groups: dict[tuple[str, LoadStage], list[LoadRow]] = {}
    for row in rows:
        stage = row.stage.model_copy(update={"repeat": 0})
        groups.setdefault((row.label, stage), []).append(row)
    return list(groups.values())


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
        if row.stage.kind == "closed" and figures.errors:
            texts.append(
                f"{row.stage.name}: {sum(figures.errors.values())} of {figures.num_requests} requests brought no image "
                "and their clients paused, so its images/s is no capacity"
            )
        if row.rate is not None and middle is not None and figures.lag_s > _LATE * middle:
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
    for other in groups_of(others):
        for group in groups_of(rows):
            row = group[0]
            if other[0].stage != row.stage:
                continue
            both = [[figures_of(each) for each in of] for of in (group, other)]
            figures: dict[str, list[list[float]]] = {
                "images/s": [[each.throughput for each in of] for of in both],
                "p50": [[each.latency_s.get(50, math.inf) for each in of] for of in both],
            }
            what = [
                f"{name} {_ratio(mine, theirs)}"
                for name, (mine, theirs) in figures.items()
                if all(math.isfinite(x) and x > 0 for x in (*mine, *theirs))
            ]
            same = "" if other[0].request == row.request else " (other requests)"
            lines.append(
                plain(f"{row.stage.name}, over {other[0].label}{same}: {', '.join(what) or 'no image'}")
            )
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
        "throughput": figures.throughput,
        "latency_s": {f"p{percent}": _finite(each) for percent, each in figures.latency_s.items()},
        "within_slo": figures.within_slo,
        "goodput": figures.goodput,
        "lag_s": figures.lag_s,
        "phases_ms": figures.phases_ms,
        "request": row.request.model_dump(mode="json"),
        "server": row.server,
        "began": row.began,
    }


def cells(group: Sequence[LoadRow]) -> tuple[str, ...]:
    """Return the figures of a load as text, below `HEADINGS`: medians of its repeats, with the least and the most."""
    row, figures = group[0], [figures_of(each) for each in group]
    rate = "" if row.rate is None else f" ({row.rate:.3g}/s)"
    errors: dict[str, int] = {}
    for kind, number in (item for of in figures for item in of.errors.items()):
        errors[kind] = errors.get(kind, 0) + number
    return (
        row.stage.name + rate,
        str(sum(of.num_requests for of in figures)),
        figure_text([of.throughput for of in figures]),
        *(figure_text([of.latency_s.get(p) for of in figures]) for p in (50, 95, 99)),
        figure_text([of.within_slo for of in figures], percent=True),
        figure_text([of.goodput for of in figures]),
        errors_text(errors),
    )


def errors_text(errors: dict[str, int]) -> str:
    return ", ".join(f"{number} {plain(kind)}" for kind, number in errors.items()) or "none"


def figure_text(values: Sequence[float | None], *, percent: bool = False) -> str:
    """Return the median of a figure's repeats, with the least and the most: three digits that count; "" without."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return ""
    texts = [
        "no image" if math.isinf(v) else f"{100 * v:.0f}" if percent else f"{v:.3g}"
        for v in (statistics.median_low(numbers), min(numbers), max(numbers))
    ]
    unit = " %" if percent else ""
    return f"{texts[0]}{unit}" if len(numbers) == 1 else f"{texts[0]} ({texts[1]} to {texts[2]}){unit}"


def _ratio(mine: Sequence[float], theirs: Sequence[float]) -> str:
    text = f"{statistics.median(mine) / statistics.median(theirs):.2f}x"
    if len(mine) == len(theirs) == 1:
        return text
    return f"{text} ({min(mine) / max(theirs):.2f} to {max(mine) / min(theirs):.2f})"


def _finite(value: float | None) -> float | None:
    """Return a figure as JSON has it: none where there was no image."""
    return None if value is None or math.isinf(value) else value


def _csv_row(row: LoadRow) -> dict[str, object]:
    figures: LoadFigures = figures_of(row)
    latency = {f"p{p}_s": _finite(figures.latency_s.get(p)) for p in (50, 95, 99)}
    return latency | {
        "label": plain(row.label),
        "load": row.stage.name,
        "repeat": row.stage.repeat,
        "rate": row.rate,
        "requests": figures.num_requests,
        "done": figures.num_done,
        "throughput": figures.throughput,
        "within_slo": figures.within_slo,
        "goodput": figures.goodput,
        "errors": "; ".join(f"{number} {plain(kind)}" for kind, number in figures.errors.items()),
    }


def figures_of(row: LoadRow) -> LoadFigures:
    """Return the figures of a load."""
    samples = row.samples
    done = np.array([outcome == DONE for outcome in samples.outcome], dtype=bool)
    ended, due = (np.array(column, dtype=np.float64) for column in (samples.ended_s, samples.due_s))
    latencies = np.where(done, np.round(ended - due, 5), np.inf)
    settled = due >= (_SETTLING * due.max() if row.stage.kind == "poisson" and len(due) else 0.0)
    within = None
    if row.slo_s and len(done):
        slo = np.array(row.slo_s)[list(samples.variant)]
        within = float((latencies <= slo)[settled].mean())
    return LoadFigures(
        num_requests=len(done),
        num_done=int(done.sum()),
        errors=dict(Counter(kind for kind in samples.outcome if kind != DONE).most_common()),
        throughput=throughput(row),
        latency_s={p: _percentile(latencies[settled], p) for p in PERCENTILES} if len(done) else {},
        within_slo=within,
        goodput=None if within is None or row.rate is None else within * row.rate,
        lag_s=float(np.quantile(np.subtract(samples.sent_s, samples.due_s), 0.99)) if len(done) else 0.0,
        phases_ms=_phases(row),
    )


def _percentile(latencies: NDArray[np.float64], percent: int) -> float:
    """Return the smallest latency that so many percent of the requests do not exceed."""
    return float(np.percentile(latencies, percent, method="inverted_cdf"))


def throughput(row: LoadRow) -> float:
    """Return the images a second, from the first request on.

    Of a closed loop only until its last request: clients that have gone leave the server idle.
    """
    samples = row.samples
    ends = sorted(
        end for end, outcome in zip(samples.ended_s, samples.outcome, strict=True) if outcome == DONE
    )
    if row.stage.kind == "closed" and len(ends) > (row.stage.clients or 1) + 1:
        last = max(samples.sent_s)
        ends = [end for end in ends if end <= last] or ends
    return len(ends) / (ends[-1] - min(samples.sent_s)) if ends else 0.0


def lone_latencies(row: LoadRow) -> tuple[float, ...]:
    """Return the median latency of one client by variant: by size, whatever the LoRA."""
    sizes = [size for size, _ in row.request.variants]
    done = [
        (sizes[variant], ended - due)
        for variant, due, ended, outcome in zip(
            row.samples.variant, row.samples.due_s, row.samples.ended_s, row.samples.outcome, strict=True
        )
        if outcome == DONE
    ]
    if not done:
        return ()
    overall = float(np.median([seconds for _, seconds in done]))
    by_size = {size: [seconds for other, seconds in done if other == size] for size in set(sizes)}
    return tuple(float(np.median(by_size[size])) if by_size[size] else overall for size in sizes)


def _phases(row: LoadRow) -> dict[str, float]:
    phases: dict[str, float] = {}
    for name, column in row.samples.phases_ms.items():
        values = [value for value in column if value is not None and math.isfinite(value)]
        if values:
            phases[name] = float(np.median(values))
    return phases
