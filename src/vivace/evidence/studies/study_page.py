"""A study's run as one self-contained HTML page: published beside measured, conclusions, charts and images."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from typing import TYPE_CHECKING

from markupsafe import Markup

from vivace.answers.formatting import ratio
from vivace.benchmark.store import Store
from vivace.errors import StoreError
from vivace.evidence.studies.claims import Claim, JudgedClaim, tally
from vivace.evidence.studies.study_columns import FIGURES
from vivace.evidence.studies.usage import UsageTable, usage_table
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
from vivace.report.page import (
    MAX_IMAGE_BYTES,
    Section,
    environment,
    policy_for,
    section_view,
    sorting_script,
    style_sheet,
)
from vivace.report.rows import priced

if TYPE_CHECKING:
    from vivace.evidence.studies.runs import StudyRun


@dataclass(frozen=True)
class PageCell:
    """A cell of the page's table.

    Attributes:
        text: the value, or the outcome of a trial that was not measured.
        below: the speed-up over the baseline or the share of it, with its interval.
        over: of a published value: measured divided by it.
        note: remark on the value, or why there is none.
    """

    text: str
    below: str
    over: str
    note: str
    is_measured: bool
    is_lost: bool


@dataclass(frozen=True)
class PagePart:
    """A part on one model, as the template shows it."""

    id: str
    title: str
    device: str
    groups: tuple[tuple[str, tuple[tuple[str, bool], ...]], ...]
    rows: tuple[tuple[str, str, tuple[PageCell, ...]], ...]
    gains: tuple[tuple[str, str, str, str], ...]
    notes: tuple[tuple[str, str], ...]
    remarks: tuple[str, ...]
    stand_in: str
    usage_table: UsageTable
    sections: tuple[object, ...]


def page_of(run: StudyRun) -> str:
    """Return the page of a run as HTML."""
    style = style_sheet() + resources.files("vivace.evidence.studies").joinpath(
        "templates", "study.css"
    ).read_text("utf-8")
    script, part_views, claims = sorting_script(), views(run), run.claims()
    max_bytes = MAX_IMAGE_BYTES // max(1, len(part_views))
    parts = [_part(f"part-{i}", view, run, max_bytes) for i, view in enumerate(part_views, 1)]
    return (
        environment("vivace.evidence.studies")
        .get_template("study.html")
        .render(
            file=run.file,
            parts=parts,
            claims=_claims(claims),
            tally=tally(claims),
            has_source=bool(run.file.source)
            or any(verdict.kind == "published" for _, verdicts in claims for verdict in verdicts),
            style=Markup(style),
            script=Markup(script),
            policy=Markup(policy_for(style, script)),
        )
    )


def _claims(claims: Sequence[tuple[Claim, list[JudgedClaim]]]) -> list[tuple[str, list[JudgedClaim]]]:
    return [(claim.says, verdicts) for claim, verdicts in claims]


def _part(id_: str, view: PartView, run: StudyRun, max_bytes: int) -> PagePart:
    figures = view.figures()
    columns = tuple((column.name, column.kind == "measured") for column in view.columns)
    rows = tuple(
        (
            row.case.label,
            row.case.recipe,
            tuple(
                _cell(figure, compared, column.kind == "measured")
                for figure in figures
                for column, compared in zip(view.columns, row.cells[figure], strict=True)
            ),
        )
        for row in view.rows
    )
    gains = tuple(
        (member, "–", "not measured", "none")
        if gain is None
        else (member, ratio(gain.ratio), gain.verdict.value, gain.verdict.value)
        for member, gain in view.gains
    )
    planned, used = view.planned, usage_table(view)
    return PagePart(
        id=id_,
        title=view.title,
        device=next((column.name for column in view.columns if column.kind == "measured"), ""),
        groups=tuple((FIGURES[figure].title, columns) for figure in figures),
        rows=rows,
        gains=gains,
        notes=(*notes(view), *stand_ins(run.file, view), *used.reasons),
        remarks=_remarks(view),
        usage_table=used,
        stand_in="" if planned.measured_on == planned.model else planned.measured_on,
        sections=tuple(_sections(id_, view, run, max_bytes)),
    )


def _remarks(view: PartView) -> tuple[str, ...]:
    """Return remarks on the source's own cells: contradictions, and why cells are empty."""
    labels_by_note: dict[str, list[str]] = {}
    for row in view.rows:
        for figure, cells in row.cells.items():
            for column, compared in zip(view.columns, cells, strict=True):
                if column.kind == "published" and compared.cell.note:
                    labels_by_note.setdefault(compared.cell.note, []).append(
                        f"{row.case.label}, {FIGURES[figure].title}, {column.name}"
                    )
    return tuple(
        f"{places[0]}{f' and {len(places) - 1} more' if len(places) > 1 else ''}: {note}"
        for note, places in labels_by_note.items()
    )


def _cell(figure: str, compared: ComparedCell, is_measured: bool) -> PageCell:
    value = compared.cell.value
    if value is None:
        text = outcome_text(compared.cell)
        return PageCell(text, "", "", compared.cell.note, is_measured, is_lost=text != "–")
    below = relative_text(compared)
    over = "" if compared.over is None else quotient(compared.over)
    return PageCell(value_text(figure, value), below, over, compared.cell.note, is_measured, is_lost=False)


def _command(run: StudyRun, view: PartView) -> str:
    """Return the command that repeats a record's measurements."""
    is_synthetic = view.planned.measured_on.startswith(SYNTHETIC)
    return shlex.join(["vivace", "study", run.file.name, *(["--synthetic"] if is_synthetic else [])])


def _sections(id_: str, view: PartView, run: StudyRun, max_bytes: int) -> Iterator[object]:
    """Yield the report's section of the measured rows of each GPU or host: table, charts and images."""
    compared = [
        compared
        for part in run.parts
        if part.planned is view.planned
        for compared in part.compared
        if compared.records
    ]
    if not compared:
        return
    try:
        store = None if run.store is None else Store.read_only(run.store)
    except StoreError:
        store = None

    def read_image(sha256: str) -> bytes | None:
        try:
            return None if store is None else store.image_path(sha256).read_bytes()
        except OSError:
            return None

    try:
        runs = store.runs() if store is not None else []
        command = runs[-1].command if runs else _command(run, view)
        for number, comparison in enumerate(compared):
            started = min(r.started_at for record in comparison.records for r in record.rounds)
            rows = priced(comparison.rows(), run.price_per_hour)
            section = Section(command, started or datetime.now(UTC).isoformat(), tuple(rows))
            name = f"{id_}-run" if number == 0 else f"{id_}-run-{number + 1}"
            yield section_view(name, section, read_image, max_bytes)
    finally:
        if store is not None:
            store.close()
