"""Read tables from files: CSV, Markdown, HTML and JSON."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any, Self

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

    def filled(self, rows: Iterable[tuple[int, Sequence[str]]]) -> Self:
        for number, cells in rows:
            self.add(number, cells)
        return self


class _Tables(HTMLParser):
    """Collects the rows of all tables, with the heading or caption above each."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: list[tuple[str, list[tuple[int, list[str]]]]] = []
        self._rows: list[tuple[int, list[str]]] | None = None
        self._text: list[str] | None = None
        self._span = 1
        self._title = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "br":
            self.handle_data(" ")
        elif tag == "table":
            self._rows = []
        elif re.fullmatch("h[1-6]|caption", tag):
            self._text = []
        elif self._rows is not None and tag in ("tr", "td", "th"):
            self._end_cell()
            if tag == "tr" or not self._rows:
                self._rows.append((self.getpos()[0], []))
            if tag != "tr":
                self._text = []
                span = dict(attrs).get("colspan") or "1"
                self._span = min(int(span), 1000) if span.isdecimal() else 1

    def handle_endtag(self, tag: str) -> None:
        if re.fullmatch("h[1-6]|caption", tag):
            self._title, self._text = self._words(), None
        elif self._rows is not None and tag in ("table", "td", "th", "tr"):
            self._end_cell()
            if tag == "table":
                self.tables.append((self._title, [row for row in self._rows if row[1]]))
                self._rows = None

    def handle_data(self, data: str) -> None:
        if self._text is not None:
            self._text.append(data)

    def _words(self) -> str:
        return " ".join("".join(self._text or ()).split())

    def _end_cell(self) -> None:
        if self._text is not None and self._rows:
            self._rows[-1][1].extend([self._words(), *[""] * (self._span - 1)])
        self._text = None


def read_tables(file: Path) -> list[ForeignTable]:
    """Return the tables of a file, by its suffix: CSV and TSV hold one, Markdown, HTML and JSON any number."""
    suffix = _ALSO.get(file.suffix.lower(), file.suffix.lower())
    if suffix not in SUFFIXES:
        raise UsageError(f"{file}: give a file that ends in {', '.join(SUFFIXES)}")
    with reading(file, UsageError, "give a CSV, Markdown, HTML or JSON file"):
        text = read_text(file, _MAX_BYTES)
        match suffix:
            case ".md" | ".txt":
                tables = [*_markdown(file, text), *_html(file, text)]
            case ".html":
                tables = list(_html(file, text))
            case ".json" | ".jsonl":
                tables = _json(file, text, is_lines=suffix == ".jsonl")
            case _:
                tables = _csv(file, text, suffix)
    if sum(len(table.rows) for table in tables) > _MAX_ROWS:
        raise UsageError(f"{file}: more than {_MAX_ROWS:,} rows; give a part of it")
    return tables


def _csv(file: Path, text: str, suffix: str) -> list[ForeignTable]:
    if text[:4].lower() == "sep=" and len(text) > 4:  # a spreadsheet's own first line
        delimiter = text[4]
        rows = [row for row in _csv_rows(text, delimiter) if row[0] > 1]
    else:
        preferred = "\t" if suffix == ".tsv" else ","
        by_delimiter = {delimiter: _csv_rows(text, delimiter) for delimiter in _DELIMITERS}
        delimiter = max(_DELIMITERS, key=lambda each: (*_fit(by_delimiter[each]), each == preferred))
        rows = by_delimiter[delimiter]
    if not rows:
        return []
    width = _usual_width(rows)
    first = next(index for index, (_, cells) in enumerate(rows) if len(cells) == width)
    above, (_, headings), below = rows[:first], rows[first], rows[first + 1 :]
    context = "\n".join(" ".join(cells) for _, cells in above)
    table = ForeignTable(file, tuple(headings), context=context, delimiter=delimiter)
    table.unread += [
        f"line {number}: it is above the headings, and not a row of {width} cells" for number, _ in above
    ]
    return [table.filled(below)]


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
    """Return how well a delimiter divides a file: whether at all, the share of equal rows, and their cells."""
    if not rows:
        return False, 0.0, 0
    width, head = _usual_width(rows), rows[:200]
    return width > 1, sum(len(cells) == width for _, cells in head) / len(head), width


def _json(file: Path, text: str, *, is_lines: bool) -> list[ForeignTable]:
    """Return the tables of a JSON text, or of one with a value in each line."""
    # Only line feeds end a line of JSON; other separators may stand in its texts.
    lines = [line for line in text.split("\n") if line.strip()]
    content: Any = [parse_json(line) for line in lines] if is_lines else parse_json(text)
    if isinstance(content, dict) and KEY in content:
        return [  # for each comparison, with seconds per image
            ForeignTable(file, _CONTRIBUTED_HEADINGS, context=f"comparison {number}", unit="row").filled(
                enumerate(map(_contributed_cells, contributed.rows), 1)
            )
            for number, contributed in enumerate(read_contribution(content).comparisons, 1)
        ]
    tables = [
        ForeignTable(file, tuple(headings), context=name, unit="row").filled(rows)
        for name, headings, rows in _tables_in(content, "")
    ]
    return [table for table in tables if table.headings]


JsonTable = tuple[str, Sequence[str], list[tuple[int, list[str]]]]
"""The path of its key, its headings, and its numbered rows."""


def _tables_in(content: Any, name: str) -> Iterator[JsonTable]:
    if isinstance(content, list):
        if content and all(isinstance(value, list) for value in content):
            if len(content) > 1 and _are_texts(content[0]):
                yield _of_lists(name, content[0], content[1:], 2)
            return
        yield _of_objects(name, [(n, value) for n, value in enumerate(content, 1) if isinstance(value, dict)])
        for value in content:
            yield from _tables_inside(value, name)
    elif isinstance(content, dict):
        values = list(content.values())
        shared = set.intersection(*map(set, values)) if _are(dict, values) else set()
        if len(values) > 1 and _are(list, values) and _are_columns(values):
            yield _of_lists(name, list(content), list(zip(*values, strict=True)), 1)
        elif len(values) > 1 and shared:
            yield _of_objects(name, list(enumerate(({_LABEL: key} | content[key] for key in content), 1)))
            for value in values:
                yield from _tables_inside(value, name)
        else:
            if not name:
                yield _of_objects("", [(1, {k: v for k, v in content.items() if k not in _HEADINGS})])
            yield from _tables_inside(content, name)


def _tables_inside(content: Any, name: str) -> Iterator[JsonTable]:
    if isinstance(content, list):
        yield from _tables_in(content, name)
    if not isinstance(content, dict):
        return
    headings = next((content[key] for key in _HEADINGS if _are_texts(content.get(key))), None)
    for key, value in content.items():
        below = f"{name}.{key}".lstrip(".")
        if (
            headings
            and isinstance(value, list)
            and _are(list, value)
            and {*map(len, value)} == {len(headings)}
        ):
            yield _of_lists(below, headings, value, 1)
        elif isinstance(value, list | dict) and value is not headings:
            yield from _tables_in(value, below)


def _of_objects(name: str, rows: Sequence[tuple[int, dict[str, Any]]]) -> JsonTable:
    flat = [(number, _flat(row)) for number, row in rows]
    headings = list(dict.fromkeys(key for _, row in flat for key in row))
    return name, headings, [(number, [row.get(key, "") for key in headings]) for number, row in flat]


def _of_lists(name: str, headings: Sequence[Any], rows: Sequence[Sequence[Any]], first: int) -> JsonTable:
    cells = ([_text(value) or "" for value in row] for row in rows)
    return name, [str(heading) for heading in headings], list(enumerate(cells, first))


def _are(kind: type, values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, kind) for value in values)


def _are_texts(content: Any) -> bool:
    return isinstance(content, list) and _are(str, content)


def _are_columns(values: Sequence[list[Any]]) -> bool:
    return len({len(value) for value in values}) == 1 and all(
        value and not isinstance(value[0], list | dict) for value in values
    )


def _flat(content: dict[str, Any], before: str = "") -> dict[str, str]:
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


def _markdown(file: Path, text: str) -> Iterator[ForeignTable]:
    """Yield the tables of a Markdown text, with the headings or the line above each as its context."""
    lines = [_QUOTED.sub("", line) for line in lines_of(text)]
    context: list[str] = []
    table: ForeignTable | None = None
    for number, (before, line) in enumerate(zip(["", *lines], [*lines, ""], strict=True), 1):
        if table is not None and "|" in line:
            table.add(number, _cells(line))
            continue
        if table is not None:
            yield table
            table = None
        if "|" in line and _RULE.match(line) and "|" in before:
            headings = tuple(_cells(before))
            table = ForeignTable(file, headings, context="\n".join(context[-3:]), delimiter="|")
        elif line.startswith("#"):
            context = [*[heading for heading in context if _depth(heading) < _depth(line)], line]
        elif line.strip() and "|" not in line:
            context = [*[heading for heading in context if heading.startswith("#")], line]


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip("#")) if line.startswith("#") else 99


def _cells(line: str) -> list[str]:
    cells = [cell.strip() for cell in _SEPARATOR.split(line.strip().removeprefix("|"))]
    return cells if cells[-1] else cells[:-1]


def _html(file: Path, text: str) -> Iterator[ForeignTable]:
    """Yield the tables of an HTML page, or of HTML inside Markdown; cells that span several count as the first."""
    reader = _Tables()
    reader.feed(text)
    reader.close()
    for title, rows in reader.tables:
        if rows:
            yield ForeignTable(file, tuple(rows[0][1]), context=title).filled(rows[1:])


def read_contribution(content: dict[str, Any]) -> Contribution:
    """Check the content of a contribution."""
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
