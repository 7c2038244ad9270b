"""Tables in Markdown and in HTML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from vivace.evidence.lint.file_tables import Table
from vivace.foundation.untrusted.terminal_text import lines_of

_RULE = re.compile(r"^\s*\|?\s*:?-{1,}:?\s*(\|\s*:?-{1,}:?\s*)*\|?\s*$")
_SEPARATOR = re.compile(r"(?<!\\)\|")
_QUOTED = re.compile(r"^\s*(?:>\s?)+")


def markdown_tables(file: Path, text: str) -> Iterator[Table]:
    """Yield the tables of a Markdown text, with the headings or the line above each as its context."""
    lines = [_QUOTED.sub("", line) for line in lines_of(text)]
    context: list[str] = []
    table: Table | None = None
    for index, line in enumerate(lines):
        if table is not None and "|" in line:
            table.add(index + 1, _cells(line))
            continue
        if table is not None:
            yield table
            table = None
        if "|" in line and _RULE.match(line) and index and "|" in lines[index - 1]:
            headings = tuple(_cells(lines[index - 1]))
            table = Table(file, headings, context="\n".join(context[-3:]), delimiter="|")
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


def html_tables(file: Path, text: str) -> Iterator[Table]:
    """Yield the tables of an HTML page, or of HTML inside Markdown; cells that span several count as the first."""
    if "<table" not in text.lower():
        return
    reader = _Tables()
    reader.feed(text)
    reader.close()
    for title, rows in reader.tables:
        if not rows:
            continue
        table = Table(file, tuple(rows[0][1]), context=title)
        for number, cells in rows[1:]:
            table.add(number, cells)
        yield table


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
