"""Apply the rules to the tables of files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vivace.hardware import gpu_in
from vivace.lint.columns import BYTES, COUNTS, PROFILE, TEXTS, TIMES, Column, column_of
from vivace.lint.findings import Finding, Reading
from vivace.lint.rules import RULES
from vivace.lint.tables import Table, is_section, read_tables
from vivace.lint.values import Number, plain_cell, read_number

_STEPS = re.compile(r"\b(\d{1,3})\s*(?:inference |denoising )?steps\b", re.IGNORECASE)


def lint(files: Sequence[Path], given: Mapping[str, str] | None = None) -> list[Finding]:
    """Return what is wrong with the tables of files, in their order.

    Args:
        given: "model", "gpu" and "steps" of rows that do not name theirs.

    Raises:
        UsageError: a file cannot be read.
    """
    return [finding for file in files for table in read_tables(file) for finding in check_table(table, given)]


def check_table(table: Table, given: Mapping[str, str] | None = None) -> list[Finding]:
    """Return what is wrong with a table."""
    rows = readings(table, given or {})
    found = [
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
        (one if one.row is not None else _placed(one, first) for one in found), key=lambda one: one.row or 0
    )


def _placed(finding: Finding, first: int | None) -> Finding:
    """Name the table by its first row, where the whole table is meant."""
    return replace(finding, row=first, label="the whole table")


def readings(table: Table, given: Mapping[str, str]) -> list[Reading]:
    """Return the rows that have figures; one for each GPU that the headings name."""
    columns = [column_of(heading) for heading in table.headings]
    gpus = list(dict.fromkeys(column.of for column in columns if column is not None))
    context = _context(table.context) | dict(given)
    section = ""
    found = []
    for line in table.rows:
        title = is_section(line)
        if title is not None:
            section = title
            continue
        for of in gpus or [""]:
            numbers, texts = _row(columns, line.cells, of)
            if "steps" in context and not {"steps", "workload_steps"} & numbers.keys():
                steps = read_number(context["steps"])
                numbers |= {} if steps is None else {"steps": steps}
            for name in ("model", "gpu"):
                if name in context:
                    texts.setdefault(name, context[name])
            if numbers:
                found.append(Reading(line.number, of, numbers, texts, section))
    return found


def _row(
    columns: Sequence[Column | None], cells: Sequence[str], of: str
) -> tuple[dict[str, Number], dict[str, str]]:
    numbers: dict[str, Number] = {}
    texts: dict[str, str] = {}
    for column, cell in zip(columns, cells, strict=True):
        if column is None or not plain_cell(cell):
            continue
        if column.role in TEXTS:
            texts.setdefault(column.role, plain_cell(cell))
        elif column.of in ("", of) and column.role not in numbers:
            number = _number(column, cell)
            if number is not None:
                numbers[column.role] = number
    return numbers, texts


def _number(column: Column, cell: str) -> Number | None:
    """Return a cell's number in seconds or bytes; None if its unit is not of the column's kind."""
    found = read_number(cell)
    if found is None:
        return None
    role = column.role
    if role in TIMES or role in PROFILE:
        wanted = "time"
    elif role in BYTES:
        wanted = "bytes"
    elif role in COUNTS:
        return found if found.kind is None else None
    else:
        return found if found.kind in (None, "percent", "ratio") else None
    if found.kind is None:
        # Without a unit anywhere, times are taken for seconds; they are compared with each other only.
        return found.scaled(column.factor, wanted)
    return found if found.kind == wanted else None


def _context(text: str) -> dict[str, str]:
    """Return the GPU and the steps that the headings above a table name."""
    found: dict[str, str] = {}
    for line in text.splitlines()[::-1]:
        gpu, _ = gpu_in(line)
        if gpu:
            found.setdefault("gpu", gpu)
        if steps := _STEPS.search(line):
            found.setdefault("steps", steps[1])
    return found


def impossible(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the findings that contradict each other or the hardware."""
    return (one for one in findings if one.severity == "impossible")
