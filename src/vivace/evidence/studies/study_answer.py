"""A study's run as an answer: published beside measured, conclusions, charts and images."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vivace.answers.answer import Answer, Cell, Fact, Facts, Look, Section, Table, TableColumn, TableRow
from vivace.answers.formatting import ratio
from vivace.benchmark.run import reader
from vivace.benchmark.store import Store
from vivace.errors import StoreError
from vivace.evidence.studies.claims import Claim, ClaimVerdict, JudgedClaim, tally
from vivace.evidence.studies.study_columns import FIGURES
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
from vivace.models.find import SYNTHETIC
from vivace.report.rows import priced
from vivace.report.run_answer import answer_of as answer_of_run
from vivace.report.run_images import ReadImage, no_images
from vivace.report.usage import SHORT, numbers, usage_table

if TYPE_CHECKING:
    from vivace.evidence.studies.runs import StudyRun

_ON_TERMINALS = ("model_memory", "peak_memory", "clip")
"""Figures that a terminal shows besides the part's time; pages and CSV have all."""
_FIELDS = (
    "study", "part", "model", "measured_on", "row", "recipe", "figure", "unit", "source", "kind", "outcome", "value",
    "low", "high", "relative", "relative_low", "relative_high", "relative_to_s", "measured_over_published", "note",
)  # fmt: skip
_LOOKS: dict[ClaimVerdict, Look] = {ClaimVerdict.AGREES: "good", ClaimVerdict.DISAGREES: "bad"}


def answer_of(run: StudyRun, reproduce: str = "") -> Answer:
    """Return the answer of a run: its conclusions, and a part for each of its parts on each model."""
    claims, parts = run.claims(), views(run)
    source = (f"Published numbers: {run.file.source}",) if run.file.source else ()
    return Answer(
        command=f"study {run.file.name}",
        headline=run.file.title,
        data=to_json(run),
        table=flat(run),
        verdict="complete" if run.is_complete else "incomplete",
        about=tuple(text for text in (run.file.about, *source) if text),
        sections=_conclusions(run, claims),
        parts=tuple(_part(view, run) for view in parts),
        reproduce=reproduce,
        explains=bool(run.records),
    )


def flat(run: StudyRun) -> list[dict[str, Any]]:
    """Return one dictionary for each cell, published and measured, in seconds, bytes or the figure's own unit."""
    lines = []
    for view in views(run):
        part = view.planned
        for row in view.rows:
            case = row.case
            about = (run.file.name, part.part.name, part.model, part.measured_on, case.label, case.recipe)
            for figure, cells in row.cells.items():
                unit = {"time": "s", "memory": "bytes", "number": "1"}[FIGURES[figure].kind]
                for column, compared in zip(view.columns, cells, strict=True):
                    value, relative = compared.cell.value, compared.relative
                    line = (
                        *about, figure, unit, column.name, column.kind, compared.cell.outcome,
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
        about = (run.file.name, part.part.name, part.model, part.measured_on, row.case.label, row.case.recipe)
        for _, measured in row.labelled:
            device = measured.record.environment.device_name
            for name, unit, value in numbers(measured):
                line = (*about, name, unit, device, "measured", "measured", value)
                rest = [None] * (len(_FIELDS) - len(line) - 1)
                yield dict(zip(_FIELDS, (*line, *rest, ""), strict=True))


def to_json(run: StudyRun) -> dict[str, Any]:
    gains = []
    for view in views(run):
        for member, gain in view.gains:
            speedup = gain and {
                "ratio": gain.ratio.point,
                "ci95": [gain.ratio.low, gain.ratio.high],
                "verdict": gain.verdict.value,
            }
            about = {"part": view.planned.part.name, "model": view.planned.model, "member": member}
            gains.append(about | {"speedup": speedup})
    claims = [
        {
            "says": claim.says,
            "kind": claim.kind,
            "judged": [
                {"column": v.column, "kind": v.kind, "said": v.verdict.value, "because": v.because}
                for v in verdicts
            ],
        }
        for claim, verdicts in run.claims()
    ]
    about = {"study": run.file.name, "title": run.file.title, "source": run.file.source}
    return about | {"cells": flat(run), "gains": gains, "claims": claims}


def _conclusions(run: StudyRun, claims: Sequence[tuple[Claim, list[JudgedClaim]]]) -> tuple[Section, ...]:
    if not claims:
        return ()
    is_published = run.file.source or any(v.kind == "published" for _, verdicts in claims for v in verdicts)
    about = "What this study concludes, judged by what was measured here."
    if is_published:
        about = "What the source concludes, judged by its own numbers and by those measured here."
    sides = tally(claims) if len(claims) > 1 else []  # a single one is told below
    counted = Facts(
        tuple(Fact(who, said) for who, said in sides), f"Of {len(claims)} conclusions:" if sides else ""
    )
    judged = [Facts(tuple(map(_judged, verdicts)), claim.says) for claim, verdicts in claims]
    return (
        Section(
            "Conclusions", (f"{about} Measured times are compared with their intervals.", counted, *judged)
        ),
    )


def _judged(verdict: JudgedClaim) -> Fact:
    column = f"here, {verdict.column}" if verdict.kind == "measured" else verdict.column
    return Fact(column, verdict.verdict.value, verdict.because, _LOOKS.get(verdict.verdict, "open"))


def _part(view: PartView, run: StudyRun) -> Answer:
    planned = view.planned
    measured = [entry for row in view.rows for entry in row.labelled]
    stand_in = ""
    if planned.measured_on.startswith(SYNTHETIC):
        stand_in = (
            "Measured with random weights: times and memory are the architecture’s, images show nothing."
        )
    elif planned.measured_on != planned.model:
        stand_in = (
            f"Measured on {planned.measured_on}, a small model in the place of the study’s: its timings say nothing "
            "about the published ones."
        )
    terminal = (view.time, *_ON_TERMINALS)
    reasons = Facts(tuple(Fact(rows, reason) for rows, reason in (*notes(view), *stand_ins(run.file, view))))
    return Answer(
        command="study",
        headline=view.title,
        paragraphs=(stand_in,) if stand_in else (),
        sections=(
            *(
                Section("", (_table(view, figure),), where="" if figure in terminal else "page")
                for figure in view.figures()
            ),
            Section("", (reasons,)),
            Section("What each one contributes", (_gains(view),)),
            Section("", (usage_table(measured, SHORT),), where="text"),
            Section("Remarks on the published numbers", tuple(_remarks(view)), where="page", is_folded=True),
            *_measured(view, run),
        ),
    )


def _table(view: PartView, figure: str) -> Table:
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
        TableRow(
            (
                Cell(row.case.label, below=row.case.recipe),
                Cell(row.case.recipe),
                *(_cell(figure, row.cells[figure][k], view.columns[k].kind == "measured") for k in columns),
                *(Cell(quotient(row.cells[figure][k].over)) for k in over),
            ),
            look="open" if row.row is None or row.row.latency is None else "",
        )
        for row in view.rows
    ]
    headings = (FIGURES[figure].title, *names, *(f"here / {view.columns[k].name}" for k in over))
    first, *others = map(TableColumn, headings)
    recipe = TableColumn("recipe", is_text=True, rank=1, where="text")
    return Table((replace(first, is_text=True), recipe, *others), tuple(rows))


def _cell(figure: str, compared: ComparedCell, is_measured: bool) -> Cell:
    """Return e.g. "11.3 s 1.36x [1.32, 1.40]": below a time how many times as fast as the baseline on the same GPU,
    below any other figure its share of the baseline's."""
    if compared.cell.value is None:
        text = outcome_text(compared.cell)
        return Cell(text, look="" if text == "–" else "bad")
    value, relative = value_text(figure, compared.cell.value), relative_text(compared)
    text = f"{value} {relative.replace('×', 'x', 1)}".rstrip()
    return Cell(text, value, relative, look="strong" if is_measured else "")


def _gains(view: PartView) -> Table:
    rows = [
        (member, "–", "not measured") if gain is None else (member, ratio(gain.ratio), gain.verdict.value)
        for member, gain in view.gains
    ]
    return Table.of(("contributes", "speed-up", "verdict"), rows, texts=("verdict",), is_code=True)


def _remarks(view: PartView) -> Iterator[str]:
    labels_by_note: dict[str, list[str]] = {}
    for row in view.rows:
        for figure, cells in row.cells.items():
            for column, compared in zip(view.columns, cells, strict=True):
                if column.kind == "published" and compared.cell.note:
                    place = f"{row.case.label}, {FIGURES[figure].title}, {column.name}"
                    labels_by_note.setdefault(compared.cell.note, []).append(place)
    for note, places in labels_by_note.items():
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        yield f"{places[0]}{more}: {note}"


def _measured(view: PartView, run: StudyRun) -> Iterator[Section]:
    """Yield the comparison of each GPU or host that measured the part, for a page."""
    compared = [
        compared
        for part in run.parts
        if part.planned is view.planned
        for compared in part.compared
        if compared.records
    ]
    is_synthetic = view.planned.measured_on.startswith(SYNTHETIC)
    command = shlex.join(["vivace", "study", run.file.name, *(["--synthetic"] if is_synthetic else [])])
    read: ReadImage = no_images
    if run.store is not None:
        read = reader([run.store])
        with suppress(StoreError), Store.read_only(run.store) as store:
            command = runs[-1].command if (runs := store.runs()) else command
    for comparison in compared:
        started = min(r.started_at for record in comparison.records for r in record.rounds)
        answer = answer_of_run(priced(comparison.rows(), run.price_per_hour), read=read, started_at=started)
        title, workload = answer.about
        table, *others = answer.sections
        text = " ".join([answer.headline, *answer.paragraphs])
        yield Section(title, (workload, text, *table.blocks, *answer.notes), where="page")
        yield from (replace(section, where="page") for section in others)
    if compared:
        yield Section("Reproduce", (Facts((Fact("", command, is_command=True),)),), where="page")
