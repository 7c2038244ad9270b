"""Apply the rules to the tables of files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from vivace.answers.formatting import few
from vivace.evidence.lint import comparing_rules, speedup_rules, timing_rules
from vivace.evidence.lint.columns import (
    BYTES,
    COUNTS,
    PROFILE,
    TEXTS,
    TIMES,
    Column,
    column_of,
    is_of_time,
    path_of,
    role_of_cell,
    says_time,
)
from vivace.evidence.lint.findings import Finding, Reading, Rule
from vivace.evidence.lint.model_limits import model_in, names_model
from vivace.evidence.lint.read_tables import ForeignTable, is_section, read_tables
from vivace.evidence.lint.values import Mark, Number, decimal_mark, is_missing, plain_cell, read_number
from vivace.foundation.hardware import gpu_in
from vivace.foundation.untrusted.streams import lines_of

RULES: dict[str, Rule] = {
    "mean-in-range": timing_rules.mean_in_range,
    "percentiles-in-order": timing_rules.percentiles_in_order,
    "mean-fits-percentiles": timing_rules.mean_fits_percentiles,
    "positive": timing_rules.positive,
    "percentage": timing_rules.percentages,
    "self-percentages": timing_rules.self_percentages_add_up,
    "self-within-total": timing_rules.self_within_total,
    "average-times-calls": timing_rules.average_times_calls,
    "counted-twice": timing_rules.counted_twice,
    "tuning-inside": timing_rules.tuning_inside,
    "tail-samples": timing_rules.tails_need_samples,
    "speedup": speedup_rules.speedup_fits_times,
    "throughput": timing_rules.throughput_fits_latency,
    "steps-total": timing_rules.steps_fit_total,
    "peak-memory": timing_rules.peak_holds_model,
    "units": timing_rules.units_alike,
    "repeated-rows": timing_rules.rows_repeat,
    "chip-limit": timing_rules.chip_is_fast_enough,
    "ruined-images": comparing_rules.images_are_whole,
    "threshold-order": comparing_rules.thresholds_in_order,
    "added-technique": comparing_rules.techniques_add_alike,
    "quantised-memory": comparing_rules.quantised_weights_are_smaller,
    "gpu-order": comparing_rules.gpus_keep_their_order,
    "one-baseline": comparing_rules.one_baseline,
}

_STEPS = re.compile(r"\b(\d{1,3})\s*(?:inference |denoising )?steps\b", re.IGNORECASE)
Marks = Sequence[Mark]
"""The decimal mark of each column."""
Facts = Mapping[str, str]


@dataclass
class Coverage:
    """The coverage of a table, or of several tables of a file with the same headings.

    Attributes:
        place: the number of the line or row where the table begins; None for an empty one.
        read: what each column means by its heading (a key of `columns.SYNONYMS`), figures and texts.
        unread: what was not read, by heading or place, and why.
        is_ambiguous: some figures can be read in two ways; only what is wrong in both was reported.
    """

    file: Path
    headings: tuple[str, ...]
    place: int | None
    unit: str = "line"
    read: dict[str, str] = field(default_factory=dict)
    unread: list[tuple[str, str]] = field(default_factory=list)
    figures: int = 0
    is_ambiguous: bool = False

    @property
    def where(self) -> str:
        if self.place is None:
            return str(self.file)
        return (
            f"{self.file}:{self.place}" if self.unit == "line" else f"{self.file}, {self.unit} {self.place}"
        )

    def read_in_words(self) -> str:
        return "read " + ", ".join(f"{name} ({role.replace('_', ' ')})" for name, role in self.read.items())

    def warnings(self) -> list[str]:
        by_reason: dict[str, list[str]] = {}
        for what, why in self.unread:
            by_reason.setdefault(why, []).append(what)
        unread = [f"{', '.join(filter(None, whats))}: {why}".lstrip(": ") for why, whats in by_reason.items()]
        what = "not read" if self.figures else "nothing was read"
        lines = [f"{what}: {'; '.join(unread)}"] if unread else []
        if self.is_ambiguous:
            lines.append(
                "figures such as 1,234 can be 1234 or 1.234 here; only what is wrong in both cases is reported"
            )
        return lines


def merged(parts: Iterable[Coverage]) -> list[Coverage]:
    """Return one coverage for all tables of a file with the same headings, such as those in each object of a JSON."""
    whole: dict[tuple[Path, tuple[str, ...]], Coverage] = {}
    for part in parts:
        first = whole.setdefault((part.file, part.headings), part)
        if first is not part:
            first.figures += part.figures
            first.unread += [each for each in part.unread if each not in first.unread]
            first.is_ambiguous |= part.is_ambiguous
    return list(whole.values())


@dataclass(frozen=True)
class CheckedTable:
    findings: list[Finding]
    coverage: Coverage


def lint(files: Sequence[Path], facts: Facts | None = None) -> list[Finding]:
    """Return the faults of the tables of files, in their order; see `checked`."""
    return [each for file in files for table in read_tables(file) for each in checked(table, facts).findings]


def checked(table: ForeignTable, facts: Facts | None = None) -> CheckedTable:
    """Return the faults of a table, and the coverage of its columns.

    Where nothing tells whether 1,234 is 1234 or 1.234, only what is wrong in both cases is reported.
    """
    columns = _columns(table)
    marks, other = _marks(table, columns)
    findings = _findings(table, _readings(table, facts or {}, columns, marks))
    if other is not None:
        also = {_key(finding) for finding in _findings(table, _readings(table, facts or {}, columns, other))}
        findings = [finding for finding in findings if _key(finding) in also]
    return CheckedTable(findings, _coverage(table, columns, marks, is_ambiguous=other is not None))


def _findings(table: ForeignTable, rows: Sequence[Reading]) -> list[Finding]:
    first = table.rows[0].number if table.rows else None
    findings = []
    for name, rule in RULES.items():
        for fault in rule(rows):
            of = fault.reading
            place = (first, "the whole table") if of is None else (of.line, of.label)
            texts = fault.numbers, fault.why, fault.check
            findings.append(Finding(table.file, *place, name, fault.severity, *texts, table.unit))
    return sorted(findings, key=lambda finding: finding.row or 0)


def _key(finding: Finding) -> tuple[str, int | None, str, str]:
    return finding.rule, finding.row, finding.label, finding.severity


def _columns(table: ForeignTable) -> list[Column | None]:
    columns: list[Column | None] = []
    for heading in table.headings:
        column = _column(table, heading)
        is_twice = any(
            other and column and (other.role, other.of, other.path) == (column.role, column.of, column.path)
            for other in columns
        )
        columns.append(None if is_twice else column)
    return columns


def _column(table: ForeignTable, heading: str) -> Column | None:
    column = column_of(heading)
    is_json = table.unit == "row"
    if column is None or column.role not in TIMES | {"rate", "throughput"}:
        return column
    if is_json:
        column = replace(column, path=path_of(heading))
    if column.role not in TIMES or column.kind is not None:
        return column
    above = column.path.rpartition(".")[2]
    if above and not is_of_time(above):
        return None  # in JSON "clip.mean" is no time, and "latency.mean" is one
    # "mean time" is in seconds; a bare "mean" has no unit.
    return replace(column, kind="time") if says_time(heading) else column


def _marks(table: ForeignTable, columns: Sequence[Column | None]) -> tuple[Marks, Marks | None]:
    """Return the decimal mark of each column, and the other possible one where the cells leave it open."""
    per_column = [
        (None, False)
        if column is None or column.role in TEXTS | COUNTS
        else decimal_mark(row.cells[index] for row in table.rows)
        for index, column in enumerate(columns)
    ]
    used_marks = {mark for mark, _ in per_column if mark is not None}
    usual: Mark | None = None
    if len(used_marks) == 1:
        (usual,) = used_marks
    elif not used_marks and table.delimiter == ";":
        usual = ","
    is_open = usual is None and any(matters and mark is None for mark, matters in per_column)
    marks: list[Mark] = [mark or usual or "." for mark, _ in per_column]
    return marks, [mark or "," for mark, _ in per_column] if is_open else None


def _readings(
    table: ForeignTable, facts: Facts, columns: Sequence[Column | None], marks: Marks
) -> list[Reading]:
    """Return the rows that have figures; one for each GPU that the headings name, and each key above times in JSON."""
    known = [column for column in columns if column is not None]
    gpus = list(dict.fromkeys(column.of for column in known))
    paths = list(dict.fromkeys(column.path for column in known if column.path))
    context = _context(table.context) | dict(facts)
    section = ""
    readings = []
    for line in table.rows:
        title = is_section(line)
        if title is not None:
            section = title
            continue
        figures = [
            (column, cell, None if column.role in TEXTS else _number(column, cell, mark))
            for column, cell, mark in zip(columns, line.cells, marks, strict=True)
            if column is not None
        ]
        for path, of in product(paths if len(paths) > 1 else [""], gpus):
            numbers: dict[str, Number] = {}
            texts: dict[str, str] = {}
            for column, cell, figure in figures:
                if path and column.path not in ("", path):
                    continue
                if column.role in TEXTS:
                    if plain_cell(cell):
                        texts.setdefault(column.role, plain_cell(cell))
                elif figure is not None and column.of in ("", of):
                    numbers.setdefault(*figure)
            if not numbers:
                continue
            steps = read_number(context.get("steps", ""))
            if steps is not None and not {"steps", "workload_steps"} & numbers.keys():
                numbers["steps"] = steps
            if "gpu" in context:
                texts.setdefault("gpu", context["gpu"])
            if "model" in facts or not names_model(f"{texts.get('label', '')} {section}"):
                texts.setdefault("model", context.get("model", ""))
            where = " ".join(filter(None, (section, path)))
            readings.append(Reading(line.number, of, numbers, texts, where, table.context))
    return readings


def _number(column: Column, cell: str, mark: Mark) -> tuple[str, Number] | None:
    """Return the quantity in a cell, and its number in seconds, bytes or 1/s; None if its unit does not fit."""
    number = read_number(cell, mark)
    if number is None:
        return None
    # Without a unit anywhere, times are taken for seconds; they are compared with each other only.
    number = number.scaled(column.factor, column.kind)
    role = role_of_cell(column.role, number.kind)
    if role is None:
        return None
    if number.kind == "steps a second":
        number = number.inverse("time")
    elif number.kind in ("time an image", "time a step"):
        number = replace(number, kind="time")
    elif number.kind is None and role in PROFILE | BYTES:
        number = number.scaled(1.0, "bytes" if role in BYTES else "time")
    return role, number


def _coverage(
    table: ForeignTable, columns: Sequence[Column | None], marks: Marks, *, is_ambiguous: bool
) -> Coverage:
    place = table.rows[0].number if table.rows else None
    coverage = Coverage(table.file, table.headings, place, table.unit, is_ambiguous=is_ambiguous)
    first: dict[tuple[str, str], str] = {}
    for index, (heading, column) in enumerate(zip(table.headings, columns, strict=True)):
        heading_text = " ".join(plain_cell(heading).split()) or f"column {index + 1}"
        if column is None:
            meant = _column(table, heading)
            same = first.get((meant.role, meant.of)) if meant is not None else None
            why = f"means the same as {same!r}" if same is not None else "vivace does not know this heading"
            coverage.unread.append((heading_text, why))
            continue
        first.setdefault((column.role, column.of), heading_text)
        if column.role in TEXTS:
            coverage.read[heading_text] = column.role
            continue
        cells = [row.cells[index] for row in table.rows if is_section(row) is None]
        full = [cell for cell in cells if not is_missing(cell)]
        wrong = [cell for cell in full if _number(column, cell, marks[index]) is None]
        coverage.figures += len(full) - len(wrong)
        if len(wrong) < len(full):
            coverage.read[heading_text] = column.role
        if wrong:
            named = few([repr(cell[:40]) for cell in dict.fromkeys(wrong)], 3)
            coverage.unread.append((heading_text, f"{len(wrong)} of {len(full)} cells: {named}"))
        elif not full:
            coverage.unread.append((heading_text, "it is empty"))
    coverage.unread += [("", why) for why in table.unread]
    return coverage


def _context(text: str) -> dict[str, str]:
    """Return the GPU, the steps and the model that the headings above a table name; the nearest heading counts."""
    context: dict[str, str] = {}
    for line in lines_of(text)[::-1]:
        steps = _STEPS.search(line)
        named = {"gpu": gpu_in(line)[0], "model": model_in(line), "steps": steps[1] if steps else ""}
        context = {name: value for name, value in named.items() if value} | context
    return context
