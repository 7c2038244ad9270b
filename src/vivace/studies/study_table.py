"""A study's run as a table for the terminal, Markdown, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vivace.report.summary import ratio, seconds
from vivace.report.table import broken
from vivace.studies.claims import Claim, JudgedClaim, tally
from vivace.studies.columns import FIGURES
from vivace.studies.usage import SHORT, numbers, usage_table
from vivace.studies.view import (
    ComparedCell,
    PartView,
    notes,
    outcome_text,
    quotient,
    stand_ins,
    value_text,
    views,
)
from vivace.untrusted.terminal_text import csv_cell, markdown_cell

if TYPE_CHECKING:
    from vivace.studies.runs import StudyRun

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
        out = io.StringIO()
        writer = csv.DictWriter(out, _FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: csv_cell(value) for name, value in line.items()} for line in flat(run))
        return out.getvalue()
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
        lines += _taken_lines(run, view)
    return lines


def _taken_lines(run: StudyRun, view: PartView) -> Iterator[dict[str, Any]]:
    """Yield what the rows took of their device, in the fields of the other cells."""
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
                        "said": verdict.said.value,
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
    """Print each part's times and memory, what each member contributes, and the conclusions."""
    for index, view in enumerate(views(run)):
        if index:
            console.print()
        console.print(Text(view.title, style="bold"))
        for figure in _terminal_figures(view):
            _print_block(view, figure, console)
        _print_taken(view, console)
        for row, reason in [*notes(view), *stand_ins(run.file, view), *usage_table(view, SHORT).reasons]:
            console.print(Text(f"{row}: {reason}"))
        _print_gains(view, console)
    _print_claims(run.claims(), console)


def _terminal_figures(view: PartView) -> list[str]:
    """The part's time, memory and CLIP score; the page and CSV have all figures."""
    figure_names = view.figures()
    kept = [view.time, "model_memory", "peak_memory", "clip"]
    return [name for name in figure_names if name in kept]


def _print_block(view: PartView, figure: str, console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(FIGURES[figure].title, overflow="fold", max_width=_LABEL_WIDTH)
    columns = [
        k
        for k, column in enumerate(view.columns)
        if column.kind == "measured" or any(row.cells[figure][k].cell.value is not None for row in view.rows)
    ]
    for k in columns:
        column = view.columns[k]
        heading = column.name if column.kind == "published" else f"here: {column.name}"
        table.add_column(heading, justify="right", overflow="fold")
    over = [k for k in columns if any(row.cells[figure][k].over is not None for row in view.rows)]
    for k in over:
        table.add_column(f"here / {view.columns[k].name}", justify="right", overflow="fold")
    for row in view.rows:
        cells = [row.cells[figure][k] for k in columns]
        quotients = [quotient(row.cells[figure][k].over) for k in over]
        style = "dim" if row.row is None or row.row.latency is None else None
        label = "\n".join(broken(row.case.label, _LABEL_WIDTH))
        texts = [*(_text(figure, compared) for compared in cells), *quotients]
        table.add_row(Text(label), *map(Text, texts), style=style)
    console.print(table)


def _print_taken(view: PartView, console: Console) -> None:
    """Print how far each row is from the limit, its energy and its price."""
    summary = usage_table(view, SHORT)
    if not summary.rows:
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("measured here", overflow="fold", max_width=_LABEL_WIDTH)
    for heading in summary.headings:
        table.add_column(heading, justify="right", overflow="fold")
    for label, cells in summary.rows:
        table.add_row(Text("\n".join(broken(label, _LABEL_WIDTH))), *map(Text, cells))
    console.print(table)


def _text(figure: str, compared: ComparedCell) -> str:
    """Return e.g. "11.3 s 1.36x"."""
    if compared.cell.value is None:
        return outcome_text(compared.cell)
    text = value_text(figure, compared.cell.value)
    if compared.relative is None:
        return text
    return f"{text} {compared.relative.point:.2f}x" + (
        "" if compared.of_s is None else f" of {seconds(compared.of_s)}"
    )


def _print_gains(view: PartView, console: Console) -> None:
    if not view.gains:
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("contributes", overflow="fold", max_width=44)
    table.add_column("speed-up", justify="right", no_wrap=True)
    table.add_column("verdict")
    for member, gain in view.gains:
        cells = ("–", "not measured") if gain is None else (ratio(gain.ratio), gain.verdict.value)
        table.add_row(Text(member), *map(Text, cells))
    console.print(table)


def _print_claims(claims: Sequence[tuple[Claim, list[JudgedClaim]]], console: Console) -> None:
    if not claims:
        return
    console.print()
    console.print(Text("Conclusions", style="bold"))
    for who, sentence in tally(claims) if len(claims) > 1 else ():  # a single one is told below
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
            table.add_row(Text(f"  {name}"), Text(verdict.said.value), Text(verdict.because, style="dim"))
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
        lines += [
            "| " + " | ".join(map(markdown_cell, headings)) + " |",
            "|" + " --- |" * len(headings),
        ]
        for row in view.rows:
            cells = [row.case.label, row.case.recipe]
            for figure, k in columns:
                compared = row.cells[figure][k]
                cells.append(_text(figure, compared))
                cells += [quotient(compared.over)] if (figure, k) in over else []
            lines.append("| " + " | ".join(map(markdown_cell, cells)) + " |")
        summary = usage_table(view)
        if summary.rows:
            lines += ["", f"| {' | '.join(map(markdown_cell, ('measured here', *summary.headings)))} |"]
            lines.append("|" + " --- |" * (1 + len(summary.headings)))
            lines += [
                f"| {' | '.join(map(markdown_cell, (label, *cells)))} |" for label, cells in summary.rows
            ]
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
            f"  - {markdown_cell(f'{verdict.column}: {verdict.said.value}. {verdict.because}')}"
            for verdict in verdicts
        ]
    return "\n".join(lines).rstrip() + "\n"
