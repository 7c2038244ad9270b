"""Read tables from files: CSV, Markdown, HTML and JSON."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pydantic import ValidationError

from vivace.errors import UsageError
from vivace.evidence.lint.values import is_missing, plain_cell
from vivace.foundation.spec.contribution import FORMAT, ContributedRow, Contribution
from vivace.foundation.spec.input_errors import expectation_of
from vivace.foundation.spec.record import Outcome
from vivace.foundation.untrusted.files import parse_json, read_text, reading
from vivace.foundation.untrusted.streams import lines_of

_MAX_BYTES = 64_000_000
_MAX_ROWS = 200_000
_DELIMITERS = (",", ";", "\t", "|")
SUFFIXES = (".csv", ".tsv", ".md", ".txt", ".html", ".json", ".jsonl")
"""A text may hold tables of Markdown."""
_ALSO = {".markdown": ".md", ".htm": ".html", ".ndjson": ".jsonl", ".tab": ".tsv"}
_HEADINGS = ("columns", "headers", "header", "headings", "fields")
_LABEL = "name"
_RULE = re.compile(r"^\s*\|?\s*:?-{1,}:?\s*(\|\s*:?-{1,}:?\s*)*\|?\s*$")
_SEPARATOR = re.compile(r"(?<!\\)\|")
_QUOTED = re.compile(r"^\s*(?:>\s?)+")
KEY = "vivace_contribution"
_CONTRIBUTED_HEADINGS = (
    "recipe", "model", "gpu", "steps", "height", "width", "batch", "mean_s", "min_s", "p50_s", "max_s", "n",
)  # fmt: skip


@dataclass(frozen=True)
class TableLine:
    """A row: its place in the file, and its cells by heading number."""

    number: int
    cells: tuple[str, ...]


@dataclass
class ForeignTable:
    """A table of a file.

    Attributes:
        context: the headings or lines of text above it, which may name the GPU and the steps.
        unit: what the number of a `TableLine` counts: "line", or "row" of JSON.
        delimiter: what separates its cells; empty if that is not a character of the file.
        unread: what of it is not in `rows`, and why.
    """

    file: Path
    headings: tuple[str, ...]
    rows: list[TableLine] = field(default_factory=list)
    context: str = ""
    unit: str = "line"
    delimiter: str = ""
    unread: list[str] = field(default_factory=list)

    def add(self, number: int, cells: Sequence[str]) -> None:
        """Add a row. If it has more cells than there are headings, none can be assigned."""
        while len(cells) > len(self.headings) and is_missing(cells[-1]):
            cells = cells[:-1]
        if len(cells) > len(self.headings):
            self.unread.append(
                f"{self.unit} {number}: it has {len(cells)} cells for {len(self.headings)} headings"
            )
            return
        self.rows.append(TableLine(number, (*cells, *[""] * (len(self.headings) - len(cells)))))


class _Tables(HTMLParser):
    """Collects the cells of all tables; one inside another's cell is text of that cell."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: list[tuple[str, list[tuple[int, list[str]]]]] = []
        self._depth = 0
        self._rows: list[tuple[int, list[str]]] = []
        self._cell: list[str] | None = None
        self._span = 1
        self._title = ""
        self._heading: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self._depth += 1
            if self._depth == 1:
                self._rows = []
        elif self._depth == 1 and tag == "tr":
            self._end_cell()
            self._rows.append((self.getpos()[0], []))
        elif self._depth == 1 and tag in ("td", "th"):
            self._end_cell()
            if not self._rows:
                self._rows.append((self.getpos()[0], []))
            self._cell = []
            span = dict(attrs).get("colspan") or "1"
            self._span = min(int(span), 1000) if span.isdecimal() else 1
        elif re.fullmatch("h[1-6]|caption", tag):
            self._heading = []
        elif tag == "br":
            self.handle_data(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag == "table" and self._depth:
            self._depth -= 1
            if self._depth == 0:
                self._end_cell()
                self.tables.append((self._title, [row for row in self._rows if any(row[1])]))
        elif self._depth == 1 and tag in ("td", "th", "tr"):
            self._end_cell()
        elif re.fullmatch("h[1-6]|caption", tag) and self._heading is not None:
            self._title = " ".join("".join(self._heading).split())
            self._heading = None

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell.append(data)
        elif self._heading is not None:
            self._heading.append(data)

    def _end_cell(self) -> None:
        if self._cell is not None:
            self._rows[-1][1].extend([" ".join("".join(self._cell).split()), *[""] * (self._span - 1)])
            self._cell = None


def read_tables(file: Path) -> list[ForeignTable]:
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


def _csv(file: Path, text: str, suffix: str) -> list[ForeignTable]:
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
    table = ForeignTable(file, tuple(rows[first][1]), context="\n".join(above), delimiter=delimiter)
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


def json_tables(file: Path, text: str, *, is_lines: bool) -> list[ForeignTable]:
    """Return the tables of a JSON text, or of one with a value in each line.

    Raises:
        ValueError: it is not JSON, or says that it is a contribution and is none.
    """
    # Only line feeds end a line of JSON; other separators may stand in its texts.
    lines = [line for line in text.split("\n") if line.strip()]
    content: Any = [parse_json(line) for line in lines] if is_lines else parse_json(text)
    if isinstance(content, dict) and KEY in content:
        return contribution_tables(file, content)
    tables: list[ForeignTable] = []
    _collect(file, "", content, tables)
    return tables


def _collect(file: Path, name: str, content: Any, tables: list[ForeignTable]) -> None:
    """Add the table that a list or an object is, then those inside it."""
    if isinstance(content, list):
        if rows := [
            (number, _flat(value)) for number, value in enumerate(content, 1) if isinstance(value, dict)
        ]:
            _add(file, name, rows, tables)
        elif content and all(isinstance(value, list) for value in content):
            _add_lists(file, name, content, None, tables)
            return
        for value in content:
            _collect_inside(file, name, value, tables)
    elif isinstance(content, dict):
        if _is_table_of_columns(content):
            lists = [list(row) for row in zip(*content.values(), strict=True)]
            _add_lists(file, name, lists, [str(key) for key in content], tables)
            return
        if rows := _rows_by_key(content):
            _add(file, name, rows, tables)
            for value in content.values():
                _collect_inside(file, name, value, tables)
            return
        if name == "":
            _add(file, name, [(1, _flat({k: v for k, v in content.items() if k not in _HEADINGS}))], tables)
        _collect_inside(file, name, content, tables)


def _collect_inside(file: Path, name: str, content: Any, tables: list[ForeignTable]) -> None:
    if isinstance(content, list):
        _collect(file, name, content, tables)
    if not isinstance(content, dict):
        return
    headings = next((content[key] for key in _HEADINGS if _are_texts(content.get(key))), None)
    for key, value in content.items():
        below = f"{name}.{key}".lstrip(".")
        if headings is not None and _are_lists(value, len(headings)):
            _add_lists(file, below, value, headings, tables)
        elif isinstance(value, list | dict) and value is not headings:
            _collect(file, below, value, tables)


def _add(
    file: Path, name: str, rows: Sequence[tuple[int, dict[str, str]]], tables: list[ForeignTable]
) -> None:
    headings = tuple(dict.fromkeys(key for _, row in rows for key in row))
    if not headings:
        return
    table = ForeignTable(file, headings, context=name, unit="row")
    for number, row in rows:
        table.add(number, [row.get(key, "") for key in headings])
    tables.append(table)


def _add_lists(
    file: Path,
    name: str,
    rows: Sequence[Sequence[Any]],
    headings: Sequence[str] | None,
    tables: list[ForeignTable],
) -> None:
    """Add a table of lists, whose first is the headings if none are given and it has only texts."""
    first = 1
    if headings is None:
        if not _are_texts(rows[0]) or len(rows) < 2:
            return
        headings, rows, first = [str(value) for value in rows[0]], rows[1:], 2
    table = ForeignTable(file, tuple(headings), context=name, unit="row")
    for number, row in enumerate(rows, first):
        table.add(number, [_text(value) or "" for value in row])
    tables.append(table)


def _is_table_of_columns(content: dict[str, Any]) -> bool:
    """Whether an object has a list for each of several columns, all of one length."""
    lists = list(content.values())
    return (
        len(lists) > 1
        and all(
            isinstance(value, list) and value and not isinstance(value[0], list | dict) for value in lists
        )
        and len({len(value) for value in lists}) == 1
    )


def _rows_by_key(content: dict[str, Any]) -> list[tuple[int, dict[str, str]]]:
    """Return the rows of an object whose values are objects with the same keys, each with its own key as its name."""
    if len(content) < 2 or not all(isinstance(value, dict) for value in content.values()):
        return []
    shared = set.intersection(*(set(value) for value in content.values()))
    flat = [(key, _flat(value)) for key, value in content.items()]
    if not shared or not all(row for _, row in flat):
        return []
    return [(number, {_LABEL: key} | row) for number, (key, row) in enumerate(flat, 1)]


def _are_texts(content: Any) -> bool:
    return isinstance(content, list) and bool(content) and all(isinstance(value, str) for value in content)


def _are_lists(content: Any, width: int) -> bool:
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(value, list) and len(value) == width for value in content)
    )


def _flat(content: dict[str, Any], before: str = "") -> dict[str, str]:
    """Return an object's texts and numbers by the path of their keys."""
    flat: dict[str, str] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{before}{key}.")
        elif (text := _text(value)) is not None:
            flat[before + key] = text
    return flat


def _text(value: Any) -> str | None:
    """Return a text or a number as a cell, a list of them by how many there are; None for everything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and not any(isinstance(value, list | dict) for value in value):
        return f"{len(value)} values"
    return json.dumps(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def markdown_tables(file: Path, text: str) -> Iterator[ForeignTable]:
    """Yield the tables of a Markdown text, with the headings or the line above each as its context."""
    lines = [_QUOTED.sub("", line) for line in lines_of(text)]
    context: list[str] = []
    table: ForeignTable | None = None
    for index, line in enumerate(lines):
        if table is not None and "|" in line:
            table.add(index + 1, _cells(line))
            continue
        if table is not None:
            yield table
            table = None
        if "|" in line and _RULE.match(line) and index and "|" in lines[index - 1]:
            headings = tuple(_cells(lines[index - 1]))
            table = ForeignTable(file, headings, context="\n".join(context[-3:]), delimiter="|")
        elif line.startswith("#"):
            context = [*[heading for heading in context if _depth(heading) < _depth(line)], line]
        elif line.strip() and "|" not in line:
            context = [*[heading for heading in context if heading.startswith("#")], line]
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


def html_tables(file: Path, text: str) -> Iterator[ForeignTable]:
    """Yield the tables of an HTML page, or of HTML inside Markdown; cells that span several count as the first."""
    if "<table" not in text.lower():
        return
    reader = _Tables()
    reader.feed(text)
    reader.close()
    for title, rows in reader.tables:
        if not rows:
            continue
        table = ForeignTable(file, tuple(rows[0][1]), context=title)
        for number, cells in rows[1:]:
            table.add(number, cells)
        yield table


def read_contribution(content: dict[str, Any]) -> Contribution:
    """Check the content of a contribution.

    Raises:
        ValueError: names the key, and what was wanted.
    """
    number = content.get(KEY)
    if isinstance(number, int) and number > FORMAT:
        raise ValueError(
            f"the key {KEY!r} is {number}, and this version of vivace reads up to {FORMAT}; update vivace"
        )
    try:
        return Contribution.model_validate(content)
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"])) or KEY
        raise ValueError(f"the key {key[:120]!r}: {expectation_of(error)}") from None


def contribution_tables(file: Path, content: dict[str, Any]) -> list[ForeignTable]:
    """Return a table for each comparison, with seconds per image.

    Raises:
        ValueError: it is not what `vivace contribute` writes.
    """
    tables = []
    for number, contributed in enumerate(read_contribution(content).comparisons, 1):
        table = ForeignTable(file, _CONTRIBUTED_HEADINGS, context=f"comparison {number}", unit="row")
        for position, row in enumerate(contributed.rows, 1):
            table.add(position, _contributed_cells(row))
        tables.append(table)
    return tables


def _contributed_cells(row: ContributedRow) -> list[str]:
    trial, workload = row.record.trial, row.record.trial.workload
    measured = [round_ for round_ in row.record.rounds if round_.outcome is Outcome.MEASURED]
    seconds = [s.total_s / workload.batch for s in chain.from_iterable(r.samples for r in measured)]
    calls = {sample.num_denoiser_calls for round_ in measured for sample in round_.samples}
    times = [fmean(seconds), min(seconds), median(seconds), max(seconds)] if seconds else []
    return [
        trial.recipe.text,
        trial.model.name,
        row.record.environment.device_name,
        # A recipe may have other steps than the workload; then the limit of the chip is another one, too.
        str(workload.num_inference_steps) if calls == {workload.num_inference_steps} else "",
        str(workload.height),
        str(workload.width),
        str(workload.batch),
        *([f"{value:.9g}" for value in times] or [""] * 4),
        str(len(seconds)) if seconds else "",
    ]


def is_section(line: TableLine) -> str | None:
    """Return the title of a row that has only its first cell, as the name of a model above its rows; else None."""
    if len(line.cells) < 2:
        return None
    first, *others = map(plain_cell, line.cells)
    return first if first and not any(others) else None
