"""Read tables from files: CSV, Markdown, HTML and JSON."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from vivace.errors import UsageError
from vivace.evidence.lint.file_tables import Table
from vivace.evidence.lint.json_tables import json_tables
from vivace.evidence.lint.markup import html_tables, markdown_tables
from vivace.foundation.untrusted.files import read_text
from vivace.foundation.untrusted.reading import reading

_MAX_BYTES = 64_000_000
_MAX_ROWS = 200_000
_DELIMITERS = (",", ";", "\t", "|")
SUFFIXES = (".csv", ".tsv", ".md", ".txt", ".html", ".json", ".jsonl")
"""A text may hold tables of Markdown."""
_ALSO = {".markdown": ".md", ".htm": ".html", ".ndjson": ".jsonl", ".tab": ".tsv"}


def read_tables(file: Path) -> list[Table]:
    """Return the tables of a file, by its suffix: CSV and TSV hold one, Markdown, HTML and JSON any number.

    Raises:
        UsageError: there is no such file, it is of another kind, or it cannot be read.
    """
    suffix = _ALSO.get(file.suffix.lower(), file.suffix.lower())
    if suffix not in SUFFIXES:
        raise UsageError(f"{file}: give a file that ends in {', '.join(SUFFIXES)}")
    with reading(file, UsageError, "give a CSV, Markdown, HTML or JSON file"):
        text = read_text(file, _MAX_BYTES)
        match suffix:
            case ".md" | ".txt":
                tables = [*markdown_tables(file, text), *html_tables(file, text)]
            case ".html":
                tables = list(html_tables(file, text))
            case ".json" | ".jsonl":
                tables = json_tables(file, text, is_lines=suffix == ".jsonl")
            case _:
                tables = _csv(file, text, suffix)
    if sum(len(table.rows) for table in tables) > _MAX_ROWS:
        raise UsageError(f"{file}: more than {_MAX_ROWS:,} rows; give a part of it")
    return tables


def _csv(file: Path, text: str, suffix: str) -> list[Table]:
    """Return the table of a file whose cells a comma, a semicolon, a tab or a bar separates."""
    by_delimiter = {delimiter: _csv_rows(text, delimiter) for delimiter in _DELIMITERS}
    if text[:6].lower().startswith("sep="):  # a spreadsheet's own first line
        delimiter = text[4]
        rows = [row for row in _csv_rows(text, delimiter) if row[0] > 1]
    else:
        preferred = "\t" if suffix == ".tsv" else ","
        delimiter = max(_DELIMITERS, key=lambda each: (*_fit(by_delimiter[each]), each == preferred))
        rows = by_delimiter[delimiter]
    if not rows:
        return []
    width = _usual_width(rows)
    first = next(index for index, (_, cells) in enumerate(rows) if len(cells) == width)
    above = [" ".join(cells) for _, cells in rows[:first]]
    table = Table(file, tuple(rows[first][1]), context="\n".join(above), delimiter=delimiter)
    table.unread += [
        f"line {number}: it is above the headings, and not a row of {width} cells"
        for number, _ in rows[:first]
    ]
    for number, cells in rows[first + 1 :]:
        table.add(number, cells)
    return [table]


def _csv_rows(text: str, delimiter: str) -> list[tuple[int, list[str]]]:
    """Return the rows that have a cell, and their line numbers."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    return [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]


def _usual_width(rows: Sequence[tuple[int, Sequence[str]]]) -> int:
    """Return the number of cells of most rows; lines of one cell may be above or below the table."""
    widths = Counter(len(cells) for _, cells in rows[:200])
    several = Counter({width: number for width, number in widths.items() if width > 1 and number > 1})
    return (several or widths).most_common(1)[0][0]


def _fit(rows: Sequence[tuple[int, Sequence[str]]]) -> tuple[bool, float, int]:
    """Return how well a delimiter divides a file: whether at all, the number of equal rows, and their cells."""
    if not rows:
        return False, 0.0, 0
    width = _usual_width(rows)
    head = rows[:200]
    return width > 1, sum(len(cells) == width for _, cells in head) / len(head), width
