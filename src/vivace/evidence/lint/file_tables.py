"""Tables read from files: headings, rows, and the parts that could not be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vivace.evidence.lint.values import is_missing, plain_cell


@dataclass(frozen=True)
class TableLine:
    """A row: its place in the file, and its cells by heading number."""

    number: int
    cells: tuple[str, ...]


@dataclass
class Table:
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


def is_section(line: TableLine) -> str | None:
    """Return the title of a row that has only its first cell, as the name of a model above its rows; else None."""
    if len(line.cells) < 2:
        return None
    first, *others = map(plain_cell, line.cells)
    return first if first and not any(others) else None
