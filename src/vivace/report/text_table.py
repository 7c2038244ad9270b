"""A table of texts, for a terminal, a text file, Markdown or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from vivace.foundation.untrusted.streams import csv_cell, markdown_cell, markdown_code_cell, plain
from vivace.report.value_text import broken

if TYPE_CHECKING:
    from rich.console import Console

Alignment = Literal["left", "center", "right"]
_GAP = 2
_RULES: dict[Alignment, str] = {"left": "---", "center": ":-:", "right": "--:"}
_LEFT: Mapping[str, Alignment] = {}


@dataclass(frozen=True)
class TextTable:
    """A table of texts. Foreign text is escaped, so that no cell changes the table or controls a terminal.

    Attributes:
        left: headings of columns that are aligned to the left; the first one always is.
        label_width: of the first column on a terminal, in characters; longer labels break at plus signs.
        styles: rich's style of each row; empty for none.
        keeps_figures: whether a terminal breaks only labels.
        is_code: whether the first column is code in Markdown.
    """

    headings: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    left: frozenset[str] = frozenset()
    label_width: int | None = None
    styles: Sequence[str | None] = field(default=())
    keeps_figures: bool = False
    is_code: bool = False

    def markdown(self) -> list[str]:
        """Return the lines of the table in Markdown."""
        label = markdown_code_cell if self.is_code else markdown_cell
        rows = [(label(cells[0]), *map(markdown_cell, cells[1:])) for cells in self.rows]
        return markdown_lines([markdown_cell(heading) for heading in self.headings], rows)

    def aligned(self) -> list[str]:
        """Return the lines of the table with its columns aligned by spaces, at any width."""
        texts = [[plain(cell) for cell in cells] for cells in (self.headings, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        is_left = [self._is_left(number) for number in range(len(self.headings))]
        return [
            (" " * _GAP)
            .join(
                cell.ljust(width) if left else cell.rjust(width)
                for cell, width, left in zip(cells, widths, is_left, strict=True)
            )
            .rstrip()
            for cells in texts
        ]

    def print(self, console: Console) -> None:
        """Print the table to a terminal."""
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
        for number, heading in enumerate(self.headings):
            table.add_column(
                heading,
                justify="left" if self._is_left(number) else "right",
                no_wrap=self.keeps_figures and number > 0,
                overflow="fold",
                max_width=self.label_width if number == 0 else None,
            )
        styles = self.styles or [None] * len(self.rows)
        for (label, *cells), style in zip(self.rows, styles, strict=True):
            first = label if self.label_width is None else "\n".join(broken(label, self.label_width))
            table.add_row(*map(Text, (first, *cells)), style=style)  # Text: brackets are not rich markup
        console.print(table)

    def _is_left(self, number: int) -> bool:
        return number == 0 or self.headings[number] in self.left


def markdown_lines(
    headings: Sequence[str], rows: Iterable[Sequence[str]], aligned: Mapping[str, Alignment] = _LEFT
) -> list[str]:
    """Return a table in Markdown; the cells are Markdown already.

    Args:
        aligned: headings of columns that are not on the left.
    """
    rules = [_RULES[aligned.get(heading, "left")] for heading in headings]
    return [f"| {' | '.join(cells)} |" for cells in (headings, rules, *rows)]


def csv_text(fields: Sequence[str], rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as CSV with a line of headings. No cell is a formula to a spreadsheet."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_cell(value) for name, value in row.items()} for row in rows)
    return out.getvalue()
