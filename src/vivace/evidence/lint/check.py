"""Apply the rules to the tables of files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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
_EXAMPLES = 3


@dataclass
class Coverage:
    """The coverage of a table, or of several tables of a file with the same headings.

    Attributes:
        place: the number of the line or row where the table begins; None for an empty one.
        read: what each column means by its heading (a key of `columns.SYNONYMS`), figures and texts.
        unread: what was not read, by heading or place, and why.
        figures: how many cells with figures were read.
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

    def to_dict(self) -> dict[str, Any]:
        """Return the coverage as plain data."""
        return {
            "file": str(self.file), self.unit: self.place, "read": self.read, "figures": self.figures,
            "unread": [{"what": what, "why": why} for what, why in self.unread],
        }  # fmt: skip

    @property
    def where(self) -> str:
        """The file, and the line where the table begins."""
        if self.place is None:
            return str(self.file)
        return (
            f"{self.file}:{self.place}" if self.unit == "line" else f"{self.file}, {self.unit} {self.place}"
        )

    def read_in_words(self) -> str:
        """Describe the columns that were read, and their meanings."""
        names = [f"{heading} ({role.replace('_', ' ')})" for heading, role in self.read.items()]
        return f"read {', '.join(names)}"

    def warnings(self) -> list[str]:
        """Describe the columns and cells that were not read, and those that are ambiguous."""
        lines = []
        by_reason: dict[str, list[str]] = {}
        for what, why in self.unread:
            by_reason.setdefault(why, []).append(what)
        unread = [f"{', '.join(filter(None, whats))}: {why}".lstrip(": ") for why, whats in by_reason.items()]
        if unread:
            what = "not read" if self.figures else "nothing was read"
            lines.append(f"{what}: {'; '.join(unread)}")
        if self.is_ambiguous:
            lines.append(
                "figures such as 1,234 can be 1234 or 1.234 here; only what is wrong in both cases is reported"
            )
        return lines


@dataclass(frozen=True)
class CheckedTable:
    """The faults of a table, and the coverage of its columns."""

    findings: list[Finding]
    coverage: Coverage


def lint(files: Sequence[Path], facts: Mapping[str, str] | None = None) -> list[Finding]:
    """Return the faults of the tables of files, in their order.

    Args:
        facts: "model", "gpu" and "steps" of rows that do not name theirs.

    Raises:
        UsageError: a file cannot be read.
    """
    return [finding for file in files for table in read_tables(file) for finding in check_table(table, facts)]


def check_table(table: ForeignTable, facts: Mapping[str, str] | None = None) -> list[Finding]:
    """Return the faults of a table."""
    return checked(table, facts).findings


def checked(table: ForeignTable, facts: Mapping[str, str] | None = None) -> CheckedTable:
    """Return the faults of a table, and the coverage of its columns.

    Where nothing tells whether 1,234 is 1234 or 1.234, only what is wrong in both cases is reported.
    """
    columns = _columns(table)
    coverage = Coverage(table.file, table.headings, table.rows[0].number if table.rows else None, table.unit)
    marks, other = _marks(table, columns)
    rows = readings(table, facts or {}, columns, marks, coverage)
    findings = _findings(table, rows)
    if other is not None:
        also = {_key(finding) for finding in _findings(table, readings(table, facts or {}, columns, other))}
        findings = [finding for finding in findings if _key(finding) in also]
        coverage.is_ambiguous = True
    return CheckedTable(findings, coverage)


def _findings(table: ForeignTable, rows: Sequence[Reading]) -> list[Finding]:
    findings = [
        Finding(
            file=table.file,
            row=None if fault.reading is None else fault.reading.line,
            label="" if fault.reading is None else fault.reading.label,
            rule=name,
            severity=fault.severity,
            numbers=fault.numbers,
            why=fault.why,
            check=fault.check,
            unit=table.unit,
        )
        for name, rule in RULES.items()
        for fault in rule(rows)
    ]
    first = table.rows[0].number if table.rows else None
    return sorted(
        (finding if finding.row is not None else _placed(finding, first) for finding in findings),
        key=lambda finding: finding.row or 0,
    )


def _placed(finding: Finding, first: int | None) -> Finding:
    """Give a finding about the whole table the place of its first row."""
    return replace(finding, row=first, label="the whole table")


def _key(finding: Finding) -> tuple[str, int | None, str, str]:
    return finding.rule, finding.row, finding.label, finding.severity


def _columns(table: ForeignTable) -> list[Column | None]:
    """Return the meaning of the columns; of several with the same meaning the first is read."""
    columns = [_timed(heading, _column(table, heading)) for heading in table.headings]
    keys: set[tuple[str, str, str]] = set()
    for index, column in enumerate(columns):
        if column is None:
            continue
        key = (column.role, column.of, _path(table, index, column))
        if key in keys:
            columns[index] = None
        keys.add(key)
    return columns


def _column(table: ForeignTable, heading: str) -> Column | None:
    column = column_of(heading)
    if column is None or table.unit != "row" or column.role not in TIMES or column.kind is not None:
        return column
    # In JSON "clip.mean" is no time, and "latency.mean" is one.
    above = path_of(heading).rpartition(".")[2]
    return column if not above or is_of_time(above) else None


def _timed(heading: str, column: Column | None) -> Column | None:
    """Give a column such as "mean time" the unit of seconds; a bare "mean" gets none."""
    is_time = column is not None and column.role in TIMES and column.kind is None
    return replace(column, kind="time") if column and is_time and says_time(heading) else column


def _path(table: ForeignTable, index: int, column: Column) -> str:
    """Return the keys above a time in JSON: times below different keys measure different things."""
    is_time = column.role in TIMES | {"rate", "throughput"}
    return path_of(table.headings[index]) if table.unit == "row" and is_time else ""


def _marks(table: ForeignTable, columns: Sequence[Column | None]) -> tuple[Marks, Marks | None]:
    """Return the decimal mark of each column, and the other possible one where the cells leave it open."""
    per_column = []
    for index, column in enumerate(columns):
        is_figure = column is not None and column.role not in TEXTS | COUNTS
        per_column.append(
            decimal_mark(row.cells[index] for row in table.rows) if is_figure else (None, False)
        )
    used_marks = {mark for mark, _ in per_column if mark is not None}
    usual: Mark | None = None
    if len(used_marks) == 1:
        (usual,) = used_marks
    elif not used_marks and table.delimiter == ";":
        usual = ","
    is_open = usual is None and any(matters and mark is None for mark, matters in per_column)
    marks: list[Mark] = [mark or usual or "." for mark, _ in per_column]
    return marks, [mark or "," for mark, _ in per_column] if is_open else None


def readings(
    table: ForeignTable,
    facts: Mapping[str, str],
    columns: Sequence[Column | None] | None = None,
    marks: Marks | None = None,
    coverage: Coverage | None = None,
) -> list[Reading]:
    """Return the rows that have figures; one for each GPU that the headings name, and each key above times in JSON.

    Args:
        columns: see `_columns`; found if not given, and so are `marks`.
        coverage: records what is read and what is not.
    """
    columns = _columns(table) if columns is None else columns
    marks = _marks(table, columns)[0] if marks is None else marks
    gpus = list(dict.fromkeys(column.of for column in columns if column is not None))
    paths = [_path(table, index, column) if column else "" for index, column in enumerate(columns)]
    timed = list(dict.fromkeys(path for path, column in zip(paths, columns, strict=True) if path and column))
    context = _context(table.context) | dict(facts)
    section = ""
    readings = []
    for line in table.rows:
        title = is_section(line)
        if title is not None:
            section = title
            continue
        numbers_by_column = [
            None if column is None or column.role in TEXTS else _number(column, cell, mark)
            for column, cell, mark in zip(columns, line.cells, marks, strict=True)
        ]
        for path in timed if len(timed) > 1 else [None]:
            chosen = [
                column if path is None or not own or own == path else None
                for column, own in zip(columns, paths, strict=True)
            ]
            for of in gpus or [""]:
                numbers, texts = _row(chosen, line.cells, numbers_by_column, of)
                if "steps" in context and not {"steps", "workload_steps"} & numbers.keys():
                    steps = read_number(context["steps"])
                    numbers |= {} if steps is None else {"steps": steps}
                if "gpu" in context:
                    texts.setdefault("gpu", context["gpu"])
                if "model" in facts:
                    texts.setdefault("model", facts["model"])
                elif "model" in context and not names_model(f"{texts.get('label', '')} {section}"):
                    texts.setdefault("model", context["model"])
                if numbers:
                    where = section if path is None else " ".join(filter(None, (section, path)))
                    readings.append(Reading(line.number, of, numbers, texts, where, table.context))
    if coverage is not None:
        _note(coverage, table, columns, marks)
    return readings


def _row(
    columns: Sequence[Column | None],
    cells: Sequence[str],
    figures: Sequence[tuple[str, Number] | None],
    of: str,
) -> tuple[dict[str, Number], dict[str, str]]:
    numbers: dict[str, Number] = {}
    texts: dict[str, str] = {}
    for column, cell, figure in zip(columns, cells, figures, strict=True):
        if column is None:
            continue
        if column.role in TEXTS:
            if plain_cell(cell):
                texts.setdefault(column.role, plain_cell(cell))
        elif figure is not None and column.of in ("", of) and figure[0] not in numbers:
            numbers[figure[0]] = figure[1]
    return numbers, texts


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


def _note(coverage: Coverage, table: ForeignTable, columns: Sequence[Column | None], marks: Marks) -> None:
    """Describe which columns and cells were read."""
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
        cells = [row.cells[index] for row in table.rows if is_section(row) is None]
        full = [cell for cell in cells if not is_missing(cell)]
        if column.role in TEXTS:
            coverage.read[heading_text] = column.role
            continue
        wrong = [cell for cell in full if _number(column, cell, marks[index]) is None]
        coverage.figures += len(full) - len(wrong)
        if len(wrong) < len(full):
            coverage.read[heading_text] = column.role
        if wrong:
            coverage.unread.append((heading_text, f"{len(wrong)} of {len(full)} cells: {examples(wrong)}"))
        elif not full:
            coverage.unread.append((heading_text, "it is empty"))
    coverage.unread += [("", why) for why in table.unread]


def _context(text: str) -> dict[str, str]:
    """Return the GPU, the steps and the model that the headings above a table name; the nearest heading counts."""
    context: dict[str, str] = {}
    for line in lines_of(text)[::-1]:
        gpu, _ = gpu_in(line)
        if gpu:
            context.setdefault("gpu", gpu)
        if model := model_in(line):
            context.setdefault("model", model)
        if steps := _STEPS.search(line):
            context.setdefault("steps", steps[1])
    return context


def impossible(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the findings that contradict each other or the hardware."""
    return (finding for finding in findings if finding.severity == "impossible")


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


def examples(cells: Sequence[str]) -> str:
    """Return some of the cells that were not read, and how many there are."""
    distinct = list(dict.fromkeys(cells))
    more = f" and {len(distinct) - _EXAMPLES} more" if len(distinct) > _EXAMPLES else ""
    return ", ".join(repr(cell[:40]) for cell in distinct[:_EXAMPLES]) + more
