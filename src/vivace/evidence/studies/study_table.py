"""A study's run as a table for the terminal, Markdown, CSV or JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vivace.evidence.studies.claims import Claim, JudgedClaim, tally
from vivace.evidence.studies.study_columns import FIGURES
from vivace.evidence.studies.usage import SHORT, numbers, usage_table
from vivace.evidence.studies.view import (
    ComparedCell,
    PartView,
    notes,
    outcome_text,
    quotient,
    relative_text,
    stand_ins,
    value_text,
    views,
)
from vivace.foundation.untrusted.streams import markdown_cell
from vivace.report.summary import ratio
from vivace.report.text_table import TextTable, csv_text

if TYPE_CHECKING:
    from vivace.evidence.studies.runs import StudyRun

_PIPE_WIDTH = 120
_LABEL_WIDTH = 26
_FIELDS = (
    "study", "part", "model", "measured_on", "row", "recipe", "figure", "unit", "source", "kind", "outcome", "value",
    "low", "high", "relative", "relative_low", "relative_high", "relative_to_s", "measured_over_published", "note",
)  # fmt: skip


def render(run: StudyRun, format_: str) -> str:
    """Return the run as text in "table", "json", "csv" or "md", with a final newline."""
    if format_ == "json":
        return json.dumps(to_json(run), indent=2) + "\n"
    if format_ == "csv":
        return csv_text(_FIELDS, flat(run))
    if format_ == "md":
        return _markdown(run)
    out = io.StringIO()
    print_tables(run, Console(file=out, width=_PIPE_WIDTH, color_system=None))
    return out.getvalue()


def flat(run: StudyRun) -> list[dict[str, Any]]:
    """Return one dictionary for each cell, published and measured, in seconds, bytes or the figure's own unit."""
    lines = []
    for view in views(run):
        part = view.planned
        for row in view.rows:
            for figure, cells in row.cells.items():
                for column, compared in zip(view.columns, cells, strict=True):
                    value, relative = compared.cell.value, compared.relative
                    line = (
                        run.file.name, part.part.name, part.model, part.measured_on, row.case.label, row.case.recipe,
                        figure, _unit(figure), column.name, column.kind, compared.cell.outcome,
                        value and value.point, value and value.low, value and value.high,
                        relative and relative.point, relative and relative.low, relative and relative.high,
                        compared.of_s, compared.over, compared.cell.note,
                    )  # fmt: skip
                    lines.append(dict(zip(_FIELDS, line, strict=True)))
        lines += _usage_lines(run, view)
    return lines


def _usage_lines(run: StudyRun, view: PartView) -> Iterator[dict[str, Any]]:
    """Yield the rows' use of their device, in the fields of the other cells."""
    part = view.planned
    for row in view.rows:
        for _, measured in row.labelled:
            device = measured.record.environment.device_name
            for name, unit, value in numbers(measured):
                line = dict.fromkeys(_FIELDS) | {
                    "study": run.file.name, "part": part.part.name, "model": part.model,
                    "measured_on": part.measured_on, "row": row.case.label, "recipe": row.case.recipe,
                    "figure": name, "unit": unit, "source": device,
                    "kind": "measured", "outcome": "measured", "value": value, "note": "",
                }  # fmt: skip
                yield line


def to_json(run: StudyRun) -> dict[str, Any]:
    """Return the run as plain data: cells, contributions and conclusions."""
    return {
        "study": run.file.name,
        "title": run.file.title,
        "source": run.file.source,
        "cells": flat(run),
        "gains": [
            {
                "part": view.planned.part.name,
                "model": view.planned.model,
                "member": member,
                "speedup": None
                if gain is None
                else {
                    "ratio": gain.ratio.point,
                    "ci95": [gain.ratio.low, gain.ratio.high],
                    "verdict": gain.verdict.value,
                },
            }
            for view in views(run)
            for member, gain in view.gains
        ],
        "claims": [
            {
                "says": claim.says,
                "kind": claim.kind,
                "judged": [
                    {
                        "column": verdict.column,
                        "kind": verdict.kind,
                        "said": verdict.verdict.value,
                        "because": verdict.because,
                    }
                    for verdict in verdicts
                ],
            }
            for claim, verdicts in run.claims()
        ],
    }


def _unit(figure: str) -> str:
    return {"time": "s", "memory": "bytes", "number": "1"}[FIGURES[figure].kind]


def print_tables(run: StudyRun, console: Console) -> None:
    """Print each part's times and memory, the contribution of each member, and the conclusions."""
    for index, view in enumerate(views(run)):
        if index:
            console.print()
        console.print(Text(view.title, style="bold"))
        for figure in _terminal_figures(view):
            _block(view, figure).print(console)
        usage = usage_table(view, SHORT)
        if usage.rows:
            usage.as_text(_LABEL_WIDTH).print(console)
        for row, reason in [*notes(view), *stand_ins(run.file, view), *usage.reasons]:
            console.print(Text(f"{row}: {reason}"))
        if view.gains:
            _gains(view).print(console)
    _print_claims(run.claims(), console)


def _terminal_figures(view: PartView) -> list[str]:
    """Return the part's time, memory and CLIP score; the page and CSV have all figures."""
    figure_names = view.figures()
    kept = [view.time, "model_memory", "peak_memory", "clip"]
    return [name for name in figure_names if name in kept]


def _block(view: PartView, figure: str) -> TextTable:
    """Return one figure of a part: its rows, published and measured, and the ratio of measured to published."""
    columns = [
        k
        for k, column in enumerate(view.columns)
        if column.kind == "measured" or any(row.cells[figure][k].cell.value is not None for row in view.rows)
    ]
    over = [k for k in columns if any(row.cells[figure][k].over is not None for row in view.rows)]
    names = [
        ("" if view.columns[k].kind == "published" else "here: ") + view.columns[k].name for k in columns
    ]
    rows = [
        (
            row.case.label,
            *(_text(figure, row.cells[figure][k]) for k in columns),
            *(quotient(row.cells[figure][k].over) for k in over),
        )
        for row in view.rows
    ]
    return TextTable(
        (FIGURES[figure].title, *names, *(f"here / {view.columns[k].name}" for k in over)),
        rows,
        label_width=_LABEL_WIDTH,
        styles=["dim" if row.row is None or row.row.latency is None else None for row in view.rows],
    )


def _text(figure: str, compared: ComparedCell) -> str:
    """Return e.g. "11.3 s 1.36x [1.32, 1.40]"."""
    if compared.cell.value is None:
        return outcome_text(compared.cell)
    return (
        f"{value_text(figure, compared.cell.value)} {relative_text(compared).replace('×', 'x', 1)}".rstrip()
    )


def _gains(view: PartView) -> TextTable:
    """Return the contribution of each member of a stack."""
    rows = [
        (member, "–", "not measured") if gain is None else (member, ratio(gain.ratio), gain.verdict.value)
        for member, gain in view.gains
    ]
    return TextTable(
        ("contributes", "speed-up", "verdict"),
        rows,
        left=frozenset({"verdict"}),
        label_width=44,
        keeps_figures=True,
    )


def _print_claims(claims: Sequence[tuple[Claim, list[JudgedClaim]]], console: Console) -> None:
    if not claims:
        return
    console.print()
    console.print(Text("Conclusions", style="bold"))
    for who, sentence in tally(claims) if len(claims) > 1 else ():  # a single one is reported below
        console.print(Text(f"{who}: {sentence}"))
    devices = {verdict.column for _, verdicts in claims for verdict in verdicts if verdict.kind == "measured"}
    for claim, verdicts in claims:
        console.print(Text(claim.says))
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(width=14, overflow="fold")
        table.add_column(width=11)
        table.add_column(overflow="fold")
        for verdict in verdicts:
            name = (
                verdict.column
                if verdict.kind == "published"
                else "here"
                if len(devices) == 1
                else f"here, {verdict.column}"
            )
            table.add_row(Text(f"  {name}"), Text(verdict.verdict.value), Text(verdict.because, style="dim"))
        console.print(table)


def _markdown(run: StudyRun) -> str:
    lines = [f"# {markdown_cell(run.file.title)}", ""]
    for view in views(run):
        lines += [f"## {markdown_cell(view.title)}", ""]
        headings = ["row", "recipe"]
        columns = [(figure, k) for figure in view.figures() for k in range(len(view.columns))]
        over = {
            (figure, k)
            for figure, k in columns
            if any(r.cells[figure][k].over is not None for r in view.rows)
        }
        for figure, k in columns:
            kind = "" if view.columns[k].kind == "published" else "here: "
            headings.append(f"{FIGURES[figure].title}, {kind}{view.columns[k].name}")
            if (figure, k) in over:
                headings.append(f"{FIGURES[figure].title}, here / {view.columns[k].name}")
        rows = []
        for row in view.rows:
            cells = [row.case.label, row.case.recipe]
            for figure, k in columns:
                compared = row.cells[figure][k]
                cells.append(_text(figure, compared))
                cells += [quotient(compared.over)] if (figure, k) in over else []
            rows.append(cells)
        lines += TextTable(tuple(headings), rows).markdown()
        summary = usage_table(view)
        if summary.rows:
            lines += ["", *summary.as_text().markdown()]
        remarks = [*notes(view), *stand_ins(run.file, view), *summary.reasons]
        lines += ["", *(f"- {markdown_cell(f'{label}: {reason}')}" for label, reason in remarks)]
        for member, gain in view.gains:
            text = "not measured" if gain is None else f"{ratio(gain.ratio)}, {gain.verdict.value}"
            lines.append(f"- {markdown_cell(f'{member} contributes: {text}')}")
        lines.append("")
    if run.file.claim:
        lines += ["## Conclusions", ""]
    for claim, verdicts in run.claims():
        lines.append(f"- {markdown_cell(claim.says)}")
        lines += [
            f"  - {markdown_cell(f'{verdict.column}: {verdict.verdict.value}. {verdict.because}')}"
            for verdict in verdicts
        ]
    return "\n".join(lines).rstrip() + "\n"
