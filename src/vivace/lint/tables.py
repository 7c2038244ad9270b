"""Read tables from CSV, Markdown and JSON files."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vivace.errors import UsageError
from vivace.foreign.files import parse_json, read_text
from vivace.foreign.reading import reading
from vivace.lint.values import plain_cell

_MAX_BYTES = 64_000_000
_MAX_ROWS = 200_000
_RULE = re.compile(r"^\s*\|?\s*:?-{1,}:?\s*(\|\s*:?-{1,}:?\s*)*\|?\s*$")
_SEPARATOR = re.compile(r"(?<!\\)\|")
SUFFIXES = (".csv", ".tsv", ".md", ".txt", ".json", ".jsonl")
"""A text may hold tables of Markdown."""


@dataclass(frozen=True)
class Line:
    """A row: its place in the file, and its cells by heading number."""

    number: int
    cells: tuple[str, ...]


@dataclass
class Table:
    """A table of a file.

    Attributes:
        context: the headings or lines of text above it, which may name the GPU and the steps.
        unit: what the number of a `Line` counts: "line", or "row" of JSON.
    """

    file: Path
    headings: tuple[str, ...]
    rows: list[Line] = field(default_factory=list)
    context: str = ""
    unit: str = "line"


def read_tables(file: Path) -> list[Table]:
    """Return the tables of a file, by its suffix: CSV and TSV hold one, Markdown and JSON any number.

    Raises:
        UsageError: there is no such file, it is of another kind, or it cannot be read.
    """
    if file.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{file}: give a file that ends in {', '.join(SUFFIXES)}")
    with reading(file, UsageError, "give a CSV, Markdown or JSON file"):
        text = read_text(file, _MAX_BYTES)
        match file.suffix.lower():
            case ".md" | ".txt":
                found = list(_markdown(file, text))
            case ".json" | ".jsonl":
                found = _json(file, text)
            case suffix:
                found = _csv(file, text, "\t" if suffix == ".tsv" else ",")
    if sum(len(table.rows) for table in found) > _MAX_ROWS:
        raise UsageError(f"{file}: more than {_MAX_ROWS:,} rows; give a part of it")
    return found


def _csv(file: Path, text: str, delimiter: str) -> list[Table]:
    reader = csv.reader(io.StringIO(text), delimiter=delimiter)
    table: Table | None = None
    for cells in reader:
        if not any(cell.strip() for cell in cells):
            continue
        if table is None:
            table = Table(file, tuple(cells))
        else:
            table.rows.append(Line(reader.line_num, _filled(cells, len(table.headings))))
    return [table] if table is not None else []


def _markdown(file: Path, text: str) -> Iterator[Table]:
    lines = text.splitlines()
    context: list[str] = []
    table: Table | None = None
    for index, line in enumerate(lines):
        if table is not None and "|" in line:
            cells = _cells(line)
            table.rows.append(Line(index + 1, _filled(cells, len(table.headings))))
            continue
        if table is not None:
            yield table
            table = None
        if "|" in line and _RULE.match(line) and index and "|" in lines[index - 1]:
            table = Table(file, tuple(_cells(lines[index - 1])), context="\n".join(context[-3:]))
        elif line.startswith("#"):
            context = [*[one for one in context if _depth(one) < _depth(line)], line]
        elif line.strip() and "|" not in line:
            context = [*[one for one in context if one.startswith("#")], line]
    if table is not None:
        yield table


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip("#")) if line.startswith("#") else 99


def _cells(line: str) -> list[str]:
    cells = [cell.strip() for cell in _SEPARATOR.split(line.strip())]
    if cells and cells[0] == "":
        cells = cells[1:]
    if cells and cells[-1] == "":
        cells = cells[:-1]
    return cells


def _filled(cells: Sequence[str], number: int) -> tuple[str, ...]:
    return (*cells[:number], *[""] * (number - len(cells)))


def _json(file: Path, text: str) -> list[Table]:
    if file.suffix.lower() == ".jsonl":
        content: Any = [parse_json(line) for line in text.splitlines() if line.strip()]
    else:
        content = parse_json(text)
    found: list[Table] = []
    _collect(file, "", content, found)
    return found


def _collect(file: Path, name: str, content: Any, found: list[Table]) -> None:
    """Add a table for each list of objects; an object alone is a table of one row."""
    if isinstance(content, list):
        rows = [_flat(one) for one in content if isinstance(one, dict)]
        if rows:
            headings = tuple(dict.fromkeys(key for row in rows for key in row))
            lines = [
                Line(number, tuple(row.get(key, "") for key in headings))
                for number, row in enumerate(rows, 1)
            ]
            found.append(Table(file, headings, lines, context=name, unit="row"))
        for one in content:
            _collect_inside(file, name, one, found)
    elif isinstance(content, dict):
        if name == "":
            row = _flat(content)
            found.append(Table(file, tuple(row), [Line(1, tuple(row.values()))], unit="row"))
        _collect_inside(file, name, content, found)


def _collect_inside(file: Path, name: str, content: Any, found: list[Table]) -> None:
    if isinstance(content, dict):
        for key, value in content.items():
            if isinstance(value, list | dict):
                _collect(file, f"{name}.{key}".lstrip("."), value, found)


def _flat(content: dict[str, Any], before: str = "") -> dict[str, str]:
    """Return an object's texts and numbers by the path of their keys."""
    found: dict[str, str] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{before}{key}.")
        elif isinstance(value, str):
            found[before + key] = value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[before + key] = json.dumps(value)
    return found


def is_section(line: Line) -> str | None:
    """Return the title of a row that has only its first cell, as the name of a model above its rows; else None."""
    first, *others = line.cells
    return plain_cell(first) if plain_cell(first) and not any(map(plain_cell, others)) and others else None
