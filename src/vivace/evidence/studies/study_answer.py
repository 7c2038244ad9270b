"""A study's run as an answer: each figure with its ratio, published beside measured, conclusions, charts and images."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vivace.answers.answer import Answer, Cell, Fact, Facts, Look, Section, Table, TableColumn, TableRow
from vivace.answers.formatting import ratio, seconds
from vivace.benchmark.run import reader
from vivace.benchmark.store import Store
from vivace.errors import StoreError
from vivace.evidence.studies.expand import ModelPart, StudyRow
from vivace.evidence.studies.judging import (
    ClaimVerdict,
    JudgedClaim,
    SpeedUp,
    speed_up,
    spread_of,
    tally,
    time_of,
    value_with_unit,
)
from vivace.evidence.studies.study_columns import FIGURES, StudyCell, StudyColumn
from vivace.evidence.studies.study_file import Claim, StudyFile
from vivace.foundation.stats import Interval
from vivace.models.find import SYNTHETIC
from vivace.report.rows import Row, priced
from vivace.report.run_answer import answer_of as answer_of_run
from vivace.report.run_images import ReadImage, no_images
from vivace.report.usage import SHORT, numbers, usage_table

if TYPE_CHECKING:
    from vivace.evidence.studies.runs import MeasuredPart, StudyRun

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
    base = view.rows[0].row
    rows = [
        TableRow(
            (
                Cell(row.case.label, below=row.case.recipe),
                Cell(row.case.recipe),
                *(_cell(figure, row.cells[figure][k], view.columns[k].kind == "measured") for k in columns),
                *(Cell(quotient(row.cells[figure][k].over)) for k in over),
            ),
            () if row.row is None or base is None else row.row.describe_skipping(base),
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


@dataclass(frozen=True)
class ComparedCell:
    """A cell with its reference.

    Attributes:
        relative: times: how many times as fast as the part's baseline on the same GPU; other figures: their share of
            the baseline's. None for the baseline, and where either is missing.
        of_s: seconds of the baseline that was measured beside the row, where that is not what the baseline's row shows:
            it has rounds of other days too.
        over: of a published cell: what was measured, on the first device that has it, divided by it; None if nothing
            was, or on a small model that replaces the study's.
    """

    cell: StudyCell
    relative: Interval | None = None
    over: float | None = None
    of_s: float | None = None


@dataclass(frozen=True)
class RowView:
    """A row of a part.

    Attributes:
        row: as the part's first device measured it.
        cells: by figure, then in the order of the part's columns.
    """

    case: StudyRow
    row: Row | None
    cells: dict[str, tuple[ComparedCell, ...]]
    elsewhere: tuple[Row, ...] = ()

    @property
    def labelled(self) -> list[tuple[str, Row]]:
        """Every device's measured rows; a label names the device unless it is the part's first."""
        first = [] if self.row is None else [(self.case.label, self.row)]
        others = [
            (f"{self.case.label} ({row.record.environment.device_name})", row) for row in self.elsewhere
        ]
        return [(label, row) for label, row in (*first, *others) if row.latency is not None]


@dataclass(frozen=True)
class PartView:
    """A part on one model: its columns with figures, and its rows.

    Attributes:
        gains: what each member of a recipe contributes, with the verdict; None where it was not measured.
    """

    planned: ModelPart
    columns: tuple[StudyColumn, ...]
    num_published: int
    rows: tuple[RowView, ...]
    gains: tuple[tuple[str, SpeedUp | None], ...]

    @property
    def title(self) -> str:
        stand_in = "" if self.planned.measured_on == self.planned.model else f" ({self.planned.measured_on})"
        name = self.planned.part.title or self.planned.part.name
        return f"{self.planned.model}{stand_in}: {name}"

    @property
    def time(self) -> str:
        return time_of(self.planned)

    def figures(self) -> list[str]:
        """Return the part's figures for which any column has a number or an outcome."""
        return [
            name
            for name in self.planned.part.figures
            if any(compared.cell.outcome != "absent" for row in self.rows for compared in row.cells[name])
        ]


def views(run: StudyRun) -> list[PartView]:
    columns = run.columns
    return [_view(part, columns, run.price_per_hour) for part in run.parts]


def _view(part: MeasuredPart, columns: Sequence[StudyColumn], price_per_hour: float | None) -> PartView:
    planned = part.planned
    here = [column for column in columns if any(cell[:2] == part.key for cell in column.cells)]
    # On a small model that replaces the study's nothing is to be held against the published figures.
    measuring = () if planned.is_stand_in else [column for column in here if column.kind == "measured"]
    first, *others = (
        dict(zip(rows, priced(list(rows.values()), price_per_hour), strict=True))
        for rows in part.on_devices.values() or ({},)
    )
    baseline = planned.cases[0].label
    rows = []
    for case in planned.cases:
        cells = {
            name: tuple(
                _compared_cell(column, measuring, (*part.key, case.label, name), baseline) for column in here
            )
            for name in planned.part.figures
        }
        elsewhere = tuple(rows[case.label] for rows in others if case.label in rows)
        rows.append(RowView(case, first.get(case.label), cells, elsewhere))
    num_published = sum(column.kind == "published" for column in here)
    return PartView(planned, tuple(here), num_published, tuple(rows), tuple(part.gains()))


def _compared_cell(
    column: StudyColumn, measuring: Sequence[StudyColumn], key: tuple[str, str, str, str], baseline: str
) -> ComparedCell:
    part, model, label, figure = key
    cell, base = column.cell(*key), column.cell(part, model, baseline, figure)
    if cell.value is None:
        return ComparedCell(cell)
    over = None
    if column.kind == "published" and cell.value.point:
        values = [value.point for each in measuring if (value := each.cell(*key).value)]
        over = values[0] / cell.value.point if values else None
    if label == baseline or base.value is None or not base.value.point or not cell.value.point:
        return ComparedCell(cell, None, over)
    before, row = (column.rows.get((part, model, name)) for name in (baseline, label))
    if figure in ("latency", "p50") and row is not None and before is not None:
        beside = [row for key, row in column.rows.items() if key[:2] == (part, model)]
        baselines = column.baselines.get((part, model), ())
        measured = speed_up(before, row, baselines, spread_of(beside))
        if measured is not None:
            of_s, shown_s = measured.baseline_s, base.value.point
            is_shown = of_s is None or seconds(of_s) == seconds(shown_s)
            return ComparedCell(cell, measured.ratio, over, None if is_shown else of_s)
    share = cell.value.point / base.value.point
    is_time = FIGURES[figure].kind == "time"
    return ComparedCell(cell, Interval(1 / share if is_time else share, None, None), over)


def relative_text(compared: ComparedCell) -> str:
    """Return e.g. "0.87× [0.82, 0.92] of 0.796 s"; "" without a reference."""
    if compared.relative is None:
        return ""
    text = ratio(compared.relative).replace("x", "×", 1)
    return text if compared.of_s is None else f"{text} of {seconds(compared.of_s)}"


def value_text(figure: str, value: Interval) -> str:
    return value_with_unit(value, FIGURES[figure].kind)


def quotient(over: float | None) -> str:
    """Return measured divided by published, e.g. "0.84", "0.0063"; "–" if either is unknown."""
    return "–" if over is None else f"{over:.2f}" if over >= 0.1 else f"{over:.2g}"


def outcome_text(cell: StudyCell) -> str:
    """Return the text of a cell without a number: "out of memory", "unsupported", "–"."""
    return "–" if cell.outcome in ("absent", "measured", "published") else cell.outcome.replace("_", " ")


def stand_ins(file: StudyFile, view: PartView) -> list[tuple[str, str]]:
    """Return (rows, remark) of rows whose recipe replaces one that random weights cannot decide."""
    rows = [row.case.label for row in view.rows if row.case.stands_for]
    if not rows or file.synthetic is None:
        return []
    return [(", ".join(rows), f"measured by another recipe: {' '.join(file.synthetic.about.split())}")]


def notes(view: PartView) -> list[tuple[str, str]]:
    """Return (rows, reason) of the rows that were not measured, grouped by reason."""
    labels: dict[str, list[str]] = {}
    for row in view.rows:
        if row.case.refused:
            labels.setdefault(f"refused: {row.case.refused}", []).append(row.case.label)
        elif row.row is not None and row.row.latency is None:
            reason = f"{row.row.outcome.value.replace('_', ' ')}: {row.row.reason}"
            labels.setdefault(reason, []).append(row.case.label)
    return [(", ".join(rows), reason) for reason, rows in labels.items()]
