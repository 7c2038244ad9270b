"""The pages docs/studies/NNN.md: what each study published beside what is measured here, and its conclusions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from itertools import product
from pathlib import Path

from benchmarks import study_profiles
from benchmarks.study_groups import RESULTS, all_sittings, record_file
from docgen.models_measured import describe_environment
from docgen.study_profiles import lines as profiles_of
from vivace.answers.formatting import ratio, seconds, size
from vivace.answers.markdown import markdown_lines, table_markdown
from vivace.evidence.studies.expand import expand
from vivace.evidence.studies.judging import SpeedUp, tally
from vivace.evidence.studies.runs import StudyRun
from vivace.evidence.studies.sittings import Sitting, by_device, rounds_of, run_of
from vivace.evidence.studies.study_answer import (
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
from vivace.evidence.studies.study_columns import FIGURES, Published
from vivace.foundation.spec.record import Outcome
from vivace.foundation.untrusted.streams import markdown_cell, markdown_code_cell
from vivace.report.rows import ONE_ROUND, RANDOM_WEIGHTS
from vivace.report.usage import no_limit, usage_table

_MEMORY = ("model_memory", "peak_memory")
_SHORT = {"NVIDIA H200": "H200", "NVIDIA H100 80GB HBM3": "H100"}


@dataclass(frozen=True)
class Measured:
    """A study's run with where its rows are from.

    Attributes:
        sources: by part, model, row and device: names of the records; "" is the study's own.
        used: the sittings that rows are taken from.
    """

    run: StudyRun
    sources: Mapping[tuple[str, str, str, str], tuple[str, ...]]
    used: tuple[Sitting, ...]


def measured(name: str, folder: Path = RESULTS, *, tiny: bool = False) -> Measured:
    """Return what the records say of a study."""
    from vivace.evidence.studies.study_file import read_study

    file = read_study(name)
    planned, sittings = expand(file, tiny=tiny, synthetic=not tiny), all_sittings(name, folder)
    sources: dict[tuple[str, str, str, str], tuple[str, ...]] = {}
    used: dict[int, Sitting] = {}
    for part, (device, mine) in product(planned, by_device(sittings).items()):
        rounds = rounds_of(part, mine)
        for case in part.cases:
            for _, sitting, _ in rounds.get(case.recipe, []):
                key = (part.part.name, part.model, case.label, device)
                sources[key] = tuple(dict.fromkeys((*sources.get(key, ()), sitting.source)))
                used[id(sitting)] = sitting
    return Measured(run_of(file, planned, sittings), sources, tuple(used.values()))


def page(name: str, note: str, folder: Path = RESULTS) -> str:
    """Return the page of a study as Markdown.

    Args:
        note: the line above the heading that says the page is generated.
        folder: of the records.
    """
    study = measured(name, folder)
    file = study.run.file
    lines = [note, f"# {file.name}: {markdown_cell(file.title)}\n", *_about(study, folder)]
    for view in views(study.run):
        lines += _part(view, study)
    if name == study_profiles.STUDY:
        lines += profiles_of(folder / study_profiles.RECORD.name)
    lines += _conclusions(study.run)
    lines += _other_tables(study.run)
    return "\n".join(lines).rstrip() + "\n"


def _about(study: Measured, folder: Path) -> Iterator[str]:
    file = study.run.file
    yield f"{markdown_cell(' '.join(file.about.split()))}\n"
    yield f"- Published: {markdown_cell(file.source)}. Every cell of its tables is on this page."
    yield (
        "- Measured: the same configurations at full size with **random weights** (`--synthetic`), batch 1, text "
        "encoders in the call. Times and memory are those of the real models; images mean nothing, so quality is not "
        "judged."
    )
    for conditions in dict.fromkeys(describe_environment(sitting.environment) for sitting in study.used):
        days = sorted({row.round.started_at[:10] for s in _of(study, conditions) for row in s.rows})
        yield f"- {conditions}; {days[0] if len(days) == 1 else f'{days[0]} to {days[-1]}'}"
    borrowed = sorted({sitting.source for sitting in study.used if sitting.source})
    if borrowed:
        links = " and ".join(f"[{source}](../../results/{source})" for source in borrowed)
        yield (
            f"- Rows marked \\* are of {links}: the same model, recipe, size, steps and guidance with other prompts, "
            "which random weights take as long for. They fill gaps until the study's own record has the row."
        )
    yield (
        "- Each row is compared with the baseline that was measured beside it (× after its value, with the 95 % "
        "interval; *of* a time where the row's rounds have another baseline than the table's, which has rounds of "
        "other days too). The last columns are the value here, on the first GPU that has it, divided by the published "
        "one. A row of one round tells only differences above 10 %."
    )
    if any(
        row.limit for part in study.run.parts for rows in part.on_devices.values() for row in rows.values()
    ):
        yield (
            "- How far each row is from the GPU's [limit](../limits.md) is folded in below its part: the operations "
            "counted over the highest rates that this GPU reached in single ones. The hours there, times the price of "
            "an hour, are what 1,000 images cost; `--price-per-hour` does it for your own run."
        )
    yield f"- {_coverage(study)}"
    own = record_file(file.name, folder)
    link = f" ([record](../../results/{own.name}))" if own.exists() else ""
    yield (
        f"- Made by `python -m benchmarks.studies {file.name}`{link}, which goes on with what is missing. On your own "
        f"machine: `vivace study {file.name}`, or with `--synthetic` as here ([studies](../studies.md)).\n"
    )


def _of(study: Measured, conditions: str) -> list[Sitting]:
    return [sitting for sitting in study.used if describe_environment(sitting.environment) == conditions]


def _coverage(study: Measured) -> str:
    """Say how many of the rows are measured, lost, or missing."""
    total = measured_ = 0
    lost: dict[str, int] = {}
    for part in study.run.parts:
        for case in part.planned.cases:
            total += 1
            rows = [row for rows in part.on_devices.values() if (row := rows.get(case.label)) is not None]
            if any(row.record.outcome is Outcome.MEASURED for row in rows):
                measured_ += 1
            else:
                why = rows[0].record.outcome.value.replace("_", " ") if rows else "not measured yet"
                why = "refused" if case.refused else why
                lost[why] = lost.get(why, 0) + 1
    others = ", ".join(f"{number} {why}" for why, number in sorted(lost.items()))
    return f"**{measured_} of {total} rows are measured**" + (f"; {others}." if others else ".")


def _part(view: PartView, study: Measured) -> Iterator[str]:
    planned = view.planned
    name = planned.part.title or planned.part.name
    yield f"## {markdown_cell(planned.model)}: {markdown_cell(name)}\n"
    is_published = view.num_published > 0
    if not is_published and all(row.row is None and not row.case.refused for row in view.rows):
        labels = ", ".join(f"`{row.case.recipe}`" for row in view.rows)
        yield f"Not measured yet, and the source has no numbers of it: {labels}.\n"
        return
    figures = [figure for figure in planned.part.figures if _has_numbers(view, figure)] or [view.time]
    kept = [figure for figure in figures if figure in (view.time, *_MEMORY)]
    for figure in kept:
        yield from _table(view, figure, study, with_recipe=figure == kept[0])
    if others := [figure for figure in figures if figure not in kept]:
        yield f"<details><summary>{', '.join(FIGURES[figure].title for figure in others)}</summary>\n"
        for figure in others:
            yield from _table(view, figure, study, with_recipe=False)
        yield "</details>\n"
    for figure in planned.part.figures:
        if figure not in figures and (whys := _whys(view, figure)):
            yield f"- No numbers of {FIGURES[figure].title}: {'; '.join(whys)}"
    for label, why in notes(view):
        yield f"- {markdown_cell(f'{label}: {why}')}"
    for label, why in stand_ins(study.run.file, view):
        yield f"- {markdown_cell(f'{label}: {why}')}"
    yield from _remarks(view)
    yield from _warnings(view)
    yield ""
    yield from _card(view)
    if view.gains:
        rows = []
        for member, gain in view.gains:
            cells = ("–", "–", "not measured")
            if gain is not None:
                cells = (_times(gain), ratio(gain.ratio), gain.verdict.value)
            rows.append([markdown_code_cell(member), *cells])
        headings = ("contributes", "with it, and without", "speed-up [95 % interval]", "verdict")
        yield from markdown_lines(headings, rows)
        yield ""


def _times(gain: SpeedUp) -> str:
    """Return the two times that a gain is the quotient of, or both beside their baselines."""
    if gain.times is not None:
        return f"{seconds(gain.times[1])}, {seconds(gain.times[0])}"
    if gain.beside is None:
        return "–"
    (base_before, before), (base_after, after) = gain.beside
    return f"{seconds(after)} of {seconds(base_after)}, {seconds(before)} of {seconds(base_before)}"


def _has_numbers(view: PartView, figure: str) -> bool:
    return any(compared.cell.value is not None for row in view.rows for compared in row.cells[figure])


def _table(view: PartView, figure: str, study: Measured, *, with_recipe: bool) -> Iterator[str]:
    """Yield the table of one figure: published, measured, and the quotients."""
    columns = [
        k
        for k, column in enumerate(view.columns)
        if column.kind == "measured" or any(row.cells[figure][k].cell.value is not None for row in view.rows)
    ]
    published = [k for k in columns if k < view.num_published]
    here = [k for k in columns if k >= view.num_published]
    if FIGURES[figure].kind == "number":  # random weights have no images to look at
        here = [k for k in here if any(row.cells[figure][k].cell.value is not None for row in view.rows)]
    headings = [FIGURES[figure].title, *(["recipe"] if with_recipe else [])]
    headings += [view.columns[k].name for k in published]
    headings += [f"here: {_short(view.columns[k].name)}" for k in here]
    headings += [f"here / {view.columns[k].name}" for k in published if here]
    yield from markdown_lines([markdown_cell(heading) for heading in headings], ())
    for row in view.rows:
        cells = [markdown_cell(row.case.label)]
        cells += [markdown_code_cell(row.case.recipe)] if with_recipe else []
        compared = row.cells[figure]
        cells += [markdown_cell(_text(figure, compared[k])) for k in published]
        key = (view.planned.part.name, view.planned.model, row.case.label)
        for k in here:
            is_borrowed = any(study.sources.get((*key, view.columns[k].name), ()))
            mark = "\\*" if is_borrowed and compared[k].cell.value is not None else ""
            cells.append(markdown_cell(_text(figure, compared[k])) + mark)
        cells += [quotient(compared[k].over) for k in published if here]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _short(device: str) -> str:
    return _SHORT.get(device, device)


def _shortened(who: str) -> str:
    for name, short in _SHORT.items():
        who = who.replace(name, short)
    return who


def _text(figure: str, compared: ComparedCell) -> str:
    """Return e.g. "6.93 s, 1.49×"."""
    if compared.cell.value is None:
        return outcome_text(compared.cell)
    text = value_text(figure, compared.cell.value)
    return text if compared.relative is None else f"{text}, {relative_text(compared)}"


def _whys(view: PartView, figure: str) -> list[str]:
    """Return why a figure has no numbers, each reason once."""
    reasons: dict[str, None] = {}
    for row in view.rows:
        for column, compared in zip(view.columns, row.cells[figure], strict=True):
            if compared.cell.note and compared.cell.outcome in ("absent", "measured"):
                who = "" if column.kind == "published" else "here: "
                reasons.setdefault(f"{who}{markdown_cell(compared.cell.note)}")
    return list(reasons)


def _remarks(view: PartView) -> Iterator[str]:
    """Yield what the source's own cells need said: contradictions, and why cells are empty."""
    remarks: dict[str, list[str]] = {}
    for row in view.rows:
        for figure, cells in row.cells.items():
            if not _has_numbers(view, figure):
                continue
            for column, compared in zip(view.columns, cells, strict=True):
                if column.kind == "published" and compared.cell.note:
                    place = f"{row.case.label}, {FIGURES[figure].title}, {column.name}"
                    remarks.setdefault(compared.cell.note, []).append(place)
    for remark, places in remarks.items():
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        yield f"- {markdown_cell(f'{places[0]}{more}: {remark}')}"


def _card(view: PartView) -> Iterator[str]:
    """Yield the table of what the rows took of the GPU: distance from its limit, energy, clocks, hours of it."""
    measured = [entry for row in view.rows for entry in row.labelled]
    usage = usage_table([(_shortened(label), row) for label, row in measured])
    if not usage.rows:
        return
    yield "<details><summary>Distance from the limit, energy, clocks, GPU hours</summary>\n"
    yield from table_markdown(usage)
    yield ""
    yield from (
        f"- {markdown_cell(f'{_shortened(labels)}: {reason}')}" for labels, reason in no_limit(measured)
    )
    yield "\n</details>\n"


def _warnings(view: PartView) -> Iterator[str]:
    """Yield what a reader must know of measured rows, each warning once."""
    labels_by_warning: dict[str, list[str]] = {}
    for row in view.rows:
        for label, record in row.labelled:
            for warning in record.warnings:
                if warning not in (RANDOM_WEIGHTS, ONE_ROUND):
                    labels_by_warning.setdefault(warning, []).append(_shortened(label))
    for warning, labels in labels_by_warning.items():
        yield f"- {markdown_cell(', '.join(labels))}: {markdown_cell(warning)}"


def _conclusions(run: StudyRun) -> Iterator[str]:
    claims = run.claims()
    if not claims:
        return
    yield "## Its conclusions\n"
    yield "Judged by each GPU's published numbers, and by the rows above ([how](../studies.md#conclusions)).\n"
    tallied = "; ".join(f"{markdown_cell(_shortened(who))}: {verdict}" for who, verdict in tally(claims))
    yield f"Of {len(claims)} conclusions, by column: {tallied}.\n"
    for claim, verdicts in claims:
        yield f"- {markdown_cell(claim.says)}"
        for verdict in verdicts:
            name = verdict.column if verdict.kind == "published" else f"here, {_short(verdict.column)}"
            yield f"  - {markdown_cell(name)}: **{verdict.verdict.value}**. {markdown_cell(verdict.because)}"
        if not any(verdict.kind == "measured" for verdict in verdicts):
            yield "  - here: nothing is measured yet"
    yield ""


def _other_tables(run: StudyRun) -> Iterator[str]:
    """Yield the source's tables, or columns of them, that no part shows."""
    tables = {table for part in run.file.part for table in part.tables}
    groups: dict[tuple[str, str, str], list[Published]] = {}
    for cell in run.file.cells:
        all_tables = any(not part.tables for part in run.file.part)
        is_shown = (all_tables or cell.table in tables) and cell.gpu and cell.metric in FIGURES
        if not is_shown:
            groups.setdefault((cell.table, cell.gpu, cell.model), []).append(cell)
    if not groups:
        return
    yield "## The source's other tables and columns\n"
    for (table, gpu, model), cells in groups.items():
        title = ", ".join(text for text in (table, model, gpu) if text)
        metrics = list(dict.fromkeys(cell.metric for cell in cells))
        rows = list(dict.fromkeys(cell.row for cell in cells))
        by_key = {(cell.row, cell.metric): cell for cell in cells}
        yield f"<details><summary>{escape(title)}</summary>\n"
        yield from markdown_lines(
            ["row", *(markdown_cell(metric.replace("_", " ")) for metric in metrics)],
            [
                [markdown_code_cell(row), *(printed(by_key.get((row, metric))) for metric in metrics)]
                for row in rows
            ],
        )
        cell_notes = dict.fromkeys(cell.note for cell in cells if cell.note)
        yield ""
        yield from (f"- {markdown_cell(text)}" for text in cell_notes)
        yield "\n</details>\n" if cell_notes else "</details>\n"


def printed(cell: Published | None) -> str:
    """Return a published cell as text."""
    if cell is None or not cell.value:
        return "–"
    form: dict[str, Callable[[float], str]] = {"s": seconds, "ms": seconds}
    form |= dict.fromkeys(("GB", "GiB", "MB", "bytes"), size)
    if cell.unit in form and cell.number is not None:
        return form[cell.unit](cell.number)
    if cell.unit == "bool":
        return "yes" if cell.value == "true" else "no"
    unit = {"%": " %", "x": "×"}.get(cell.unit, "")
    return markdown_cell(cell.value + unit)
