"""What a command answers, in one form that each writer knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from vivace.foundation.stats import Interval

if TYPE_CHECKING:
    from PIL.Image import Image

Look = Literal["", "good", "bad", "open", "strong"]
Where = Literal["", "page", "text"]
"""Who writes something: everybody, pages alone, or terminals and Markdown alone."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: in one line.
        main, below: its two lines on a page; "" where the page has `text`.
        value: what a page sorts by; rows without one stay last.
    """

    text: str
    main: str = ""
    below: str = ""
    value: float | str | None = None
    look: Look = ""


@dataclass(frozen=True)
class TableColumn:
    """A column of a table.

    Attributes:
        rank: where a terminal is too narrow, the columns of the highest rank are left out first. Those of rank 0
            stay; others are also left out where they hold nothing.
    """

    name: str
    is_text: bool = False
    rank: int = 0
    where: Where = ""


@dataclass(frozen=True)
class TableRow:
    """A row of a table: its cells, the first of which names it, and notes on it."""

    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = ()
    look: Look = ""


@dataclass(frozen=True)
class Table:
    """A table. Foreign text is escaped by whoever writes it.

    Attributes:
        is_code: whether the first column is code, such as a recipe.
    """

    columns: tuple[TableColumn, ...]
    rows: tuple[TableRow, ...]
    title: str = ""
    note: str = ""
    is_code: bool = False
    is_sorted: bool = False

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        rows: Iterable[Sequence[str | Cell]],
        *,
        texts: Iterable[str] = (),
        **fields: Any,
    ) -> Table:
        """Return a table of texts.

        Args:
            names: of the columns; `texts` are those of them that are no figures, besides the first.
        """
        left = {names[0], *texts}
        cells = [TableRow(tuple(c if isinstance(c, Cell) else Cell(c) for c in row)) for row in rows]
        return cls(tuple(TableColumn(name, name in left) for name in names), tuple(cells), **fields)

    def kept(self, where: Where) -> list[int]:
        """Return the numbers of the columns that a page, or others, have."""
        return [
            number
            for number, column in enumerate(self.columns)
            if column.where in ("", where)
            and (column.rank == 0 or any(row.cells[number].text not in ("", "-", "–") for row in self.rows))
        ]


@dataclass(frozen=True)
class Fact:
    """A figure or a finding: its name, its value, and what is to be said of it.

    Attributes:
        request: a command line or request that shows it, which a page folds.
        is_command: whether the value is a command line; `is_whole` if it is never broken into several.
        where_short: what follows the value where details are left out.
    """

    name: str
    value: str
    text: str = ""
    look: Look = ""
    request: str = ""
    is_command: bool = False
    is_whole: bool = False
    is_detail: bool = False
    where_short: str = ""

    @property
    def line(self) -> str:
        """Its value and text as one phrase: a colon comes before what explains the value, not before what goes on."""
        first = self.text.partition(" ")[0] if self.value else ""
        between = ", " if first in _CONJUNCTIONS else " " if first in _PREPOSITIONS else ": "
        return between.join(part for part in (self.value, self.text) if part)


_CONJUNCTIONS = ("or", "and", "but", "so", "since")
_PREPOSITIONS = ("instead", "than", "beside", "against")


@dataclass(frozen=True)
class Facts:
    """Facts below each other, or side by side as tiles on a page."""

    facts: tuple[Fact, ...]
    title: str = ""
    are_tiles: bool = False


@dataclass(frozen=True)
class BarPart:
    """A part of a bar, in the chart's unit. `look` is a class of the style sheet."""

    start: float
    width: float
    look: str


@dataclass(frozen=True)
class Bar:
    """A line of a bar chart: parts, or single measurements, beside a name and a value.

    Attributes:
        marks: places of thin lines across the box.
        samples: instead of parts, round by round.
    """

    name: str
    value: str
    number: int | None = None
    below: str = ""
    note: str = ""
    parts: tuple[BarPart, ...] = ()
    marks: tuple[float, ...] = ()
    samples: tuple[tuple[float, ...], ...] = ()
    badge: str = ""


@dataclass(frozen=True)
class Bars:
    """A bar chart in any unit, of which the largest amount fills the box. `legend` names looks of parts.

    Where bars have samples, a box shows them around their middle, as far as `reach`, a share of it.
    """

    title: str
    bars: tuple[Bar, ...]
    about: str = ""
    legend: tuple[tuple[str, str], ...] = ()
    reach: float = 1.0


@dataclass(frozen=True)
class PlotPoint:
    """A point of a plot.

    Attributes:
        look: "baseline", "same", "changed", "good", "late" or "failed"; sets its mark.
        number, name: what the key below the plot says; None for a point without.
        is_out: whether it failed, and so counts for no front.
    """

    x: Interval
    y: Interval
    look: str
    label: str
    number: int | None = None
    name: str = ""
    is_out: bool = False


@dataclass(frozen=True)
class Plot:
    """Points by two figures.

    Attributes:
        limits: (height, label) of dashed lines.
        better: "more" or "less" of the vertical figure is better, and a Pareto front is drawn; "" for none.
        is_ratio: whether the horizontal figure is a ratio, for which the axis may be logarithmic.
        least_span: of the vertical axis.
    """

    title: str
    x_name: str
    y_name: str
    points: tuple[PlotPoint, ...]
    about: str = ""
    x_unit: str = ""
    y_unit: str = ""
    limits: tuple[tuple[float, str], ...] = ()
    better: Literal["", "more", "less"] = ""
    is_ratio: bool = False
    least_span: float = 0.0


@dataclass(frozen=True)
class ImageCell:
    """An image, by the key that its grid reads it with; None where there is none, for the reason in `note`."""

    key: str | None
    note: str = ""


@dataclass(frozen=True)
class ImageRow:
    """Images of one prompt and seed. `sources` are what they were made from: (name, key)."""

    prompt: str
    seed: str
    cells: tuple[ImageCell, ...]
    sources: tuple[tuple[str, str], ...] = ()
    caption: str = ""
    look: Look = ""
    request: str = ""


@dataclass(frozen=True)
class ImageGrid:
    """Images side by side, a row for each prompt and seed.

    Attributes:
        read: returns an image by its key, or the reason why there is none.
        has_reference: whether the first column is what the others are compared with.
        shows_difference: whether differences to it are always shown, with the place where they are largest; else
            readers can switch to them.
    """

    columns: tuple[str, ...]
    rows: tuple[ImageRow, ...]
    read: Callable[[str], Image | str]
    about: str = ""
    has_reference: bool = False
    shows_difference: bool = False


Block = str | Table | Facts | Bars | Plot | ImageGrid


@dataclass(frozen=True)
class Section:
    """Blocks under a title. `is_folded` is for pages, `is_detail` for answers that may be short."""

    title: str
    blocks: tuple[Block, ...]
    where: Where = ""
    is_folded: bool = False
    is_detail: bool = False


@dataclass(frozen=True)
class File:
    """A text that readers of a page can save."""

    name: str
    text: str


@dataclass(frozen=True)
class CiCase:
    """What a CI job counts as a test: a question or a check, and how it ended."""

    name: str
    outcome: Literal["passed", "failure", "error", "skipped"]
    message: str
    request: str = ""


@dataclass(frozen=True)
class Answer:
    """What a command answers.

    Attributes:
        parts: answers that this one is made of, such as the runs of a store.
        reproduce: the command line that answers the same again; "" if unknown.
        explains: whether a page explains the words of measurements.
        cases: what a CI job counts as tests; see `data.junit_of`.
    """

    command: str
    headline: str
    data: Any = None
    table: Sequence[Mapping[str, object]] = ()
    verdict: str = ""
    about: tuple[str, ...] = ()
    paragraphs: tuple[str, ...] = ()
    facts: Facts | None = None
    sections: tuple[Section, ...] = ()
    parts: tuple[Answer, ...] = ()
    notes: tuple[str, ...] = ()
    commands: tuple[Fact, ...] = ()
    reproduce: str = ""
    files: tuple[File, ...] = field(default=(), repr=False)
    explains: bool = False
    is_code: bool = False
    cases: tuple[CiCase, ...] = ()

    def blocks(self) -> Iterator[Block]:
        for section in self.sections:
            yield from section.blocks
        for part in self.parts:
            yield from part.blocks()
