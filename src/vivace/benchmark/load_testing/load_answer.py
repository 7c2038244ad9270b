"""Loads as an answer: a table, and each request of each load by when it was due."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from vivace.answers.answer import Answer, Plot, PlotPoint, Section, Table
from vivace.benchmark.load_testing.load_rows import DONE, LoadRow, LoadStage, figures_of
from vivace.foundation.stats import Interval

_HEADINGS = ("load", "requests", "images/s", "p50 s", "p95 s", "p99 s", "within SLO", "goodput/s", "errors")
_LATE = 0.05
"""Share of the median latency by which requests may leave late without a note."""


def answer_of(rows: Sequence[LoadRow], others: Sequence[LoadRow] = (), command: str = "") -> Answer:
    """Return the answer of loads on a server, compared with those on `others`."""
    return Answer(
        command="bench --endpoint",
        headline=_headline(rows),
        data=[as_dict(row) for row in rows],
        table=[_csv_row(row) for row in rows],
        verdict="done" if all(kind == DONE for row in rows for kind in row.samples.outcome) else "failed",
        about=(_title(rows),),
        sections=(
            Section("", (loads_table(rows),)),
            Section("Beside other servers", tuple(compare(rows, others))),
            Section(
                "Requests",
                (
                    "Seconds of each by when it was due. The dashed line is the SLO; crosses brought no image.",
                    *(_plot(row) for row in rows if row.samples.due_s),
                ),
                where="page",
            ),
        ),
        notes=tuple(_notes(rows)),
        reproduce=command,
    )


def _headline(rows: Sequence[LoadRow]) -> str:
    best = max(rows, key=lambda row: figures_of(row).throughput)
    text = f"{figure_text([figures_of(best).throughput])} images/s at most, with {best.stage.name}"
    lone = next((row for row in rows if row.stage.clients == 1), None)
    alone = None if lone is None else figures_of(lone).latency_s.get(50)
    if alone is not None and math.isfinite(alone):
        text += f"; {alone:.3g} s an image alone"
    return text


def loads_table(rows: Sequence[LoadRow]) -> Table:
    """Return the figures of loads: medians of their repeats, with the least and the most."""
    return Table.of(_HEADINGS, [_cells(group) for group in _groups(rows)], texts=("errors",))


def _plot(row: LoadRow) -> Plot:
    samples = row.samples
    points = []
    for due, ended, outcome, variant in zip(
        samples.due_s, samples.ended_s, samples.outcome, samples.variant, strict=True
    ):
        is_late = bool(row.slo_s) and ended - due > row.slo_s[variant]
        look = "failed" if outcome != DONE else "late" if is_late else "good"
        label = f"{ended - due:.3g} s" if outcome == DONE else outcome
        points.append(PlotPoint(Interval(due, None, None), Interval(ended - due, None, None), look, label))
    limits = tuple((limit, "") for limit in sorted(set(row.slo_s)))
    return Plot(row.stage.name, "due", "seconds", tuple(points), x_unit=" s", y_unit=" s", limits=limits)


def _groups(rows: Sequence[LoadRow]) -> list[list[LoadRow]]:
    groups: dict[tuple[str, LoadStage], list[LoadRow]] = {}
    for row in rows:
        stage = row.stage.model_copy(update={"repeat": 0})
        groups.setdefault((row.label, stage), []).append(row)
    return list(groups.values())


def _title(rows: Sequence[LoadRow]) -> str:
    row = rows[0]
    sizes = sorted({size for size, _ in row.request.variants if size is not None})
    parts = [row.label, row.request.model or "", ", ".join(sizes)]
    recipe = row.server.get("recipe")
    parts += [str(recipe)] if isinstance(recipe, str) else []
    parts += [f"{name}={value}" for name, value in row.request.fields.items()]
    slo = sorted({round(each, 3) for each in rows[-1].slo_s})
    limit = f"; in time: {' or '.join(f'{each:g} s' for each in slo)}" if slo else ""
    return ", ".join(part for part in parts if part) + limit


def _notes(rows: Sequence[LoadRow]) -> list[str]:
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
        phases = ", ".join(f"{name} {value:.1f}" for name, value in lone.phases_ms.items())
        texts.append(f"the server's own phases, one client, medians in ms: {phases}")
    return texts


def compare(rows: Sequence[LoadRow], others: Sequence[LoadRow]) -> list[str]:
    """Return a line for each common load with each of the other servers."""
    lines = []
    for other in _groups(others):
        for group in _groups(rows):
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
            lines.append(f"{row.stage.name}, over {other[0].label}{same}: {', '.join(what) or 'no image'}")
    return lines


def as_dict(row: LoadRow) -> dict[str, Any]:
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


def _cells(group: Sequence[LoadRow]) -> tuple[str, ...]:
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
    return ", ".join(f"{number} {kind}" for kind, number in errors.items()) or "none"


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
    return None if value is None or math.isinf(value) else value


def _csv_row(row: LoadRow) -> dict[str, object]:
    figures = figures_of(row)
    return {
        "label": row.label,
        "load": row.stage.name,
        "repeat": row.stage.repeat,
        "rate": row.rate,
        "requests": figures.num_requests,
        "done": figures.num_done,
        "throughput": figures.throughput,
        **{f"p{p}_s": _finite(figures.latency_s.get(p)) for p in (50, 95, 99)},
        "within_slo": figures.within_slo,
        "goodput": figures.goodput,
        "errors": "; ".join(f"{number} {kind}" for kind, number in figures.errors.items()),
    }
