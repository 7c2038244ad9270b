"""A study's run as rows and columns, for every format: each figure with its speed-up or share, and published ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vivace.answers.formatting import ratio, seconds
from vivace.evidence.studies.claims import value_with_unit
from vivace.evidence.studies.expand import ModelPart, StudyRow
from vivace.evidence.studies.judging import SpeedUp, speed_up, spread_of, time_of
from vivace.evidence.studies.study_columns import FIGURES, StudyCell, StudyColumn
from vivace.evidence.studies.study_file import StudyFile
from vivace.foundation.stats import Interval
from vivace.report.rows import Row, priced

if TYPE_CHECKING:
    from vivace.evidence.studies.runs import MeasuredPart, StudyRun


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
    is_baseline: bool
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
        rows.append(RowView(case, case.label == baseline, first.get(case.label), cells, elsewhere))
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
