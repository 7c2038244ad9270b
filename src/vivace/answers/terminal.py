"""An answer as text, for a terminal of any width or a pipe."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vivace.answers.answer import Answer, Block, Fact, Facts, Look, Section, Table
from vivace.answers.formatting import broken, whole_words
from vivace.foundation.untrusted.streams import plain

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 80
"""Characters of a paragraph, at most."""
PIPE_WIDTH = 180
"""Characters of a table, if standard output is a file or a pipe."""
_GAP = 2
_LEAST_LABEL = 32
"""Characters reserved for the first column, if it needs them, before other columns are left out."""
_STYLES: dict[Look, str] = {"bad": "red", "open": "dim", "strong": "bold"}

Line = tuple[str, Look]


def text_of(answer: Answer, *, width: int = PIPE_WIDTH, details: bool = True) -> str:
    """Return the answer as text that ends with a line."""
    return "\n".join(line for line, _ in lines_of(answer, width, details)) + "\n"


def print_answer(answer: Answer, console: Console, *, details: bool = True) -> None:
    from rich.text import Text

    for line, look in lines_of(answer, console.width, details):
        console.print(Text(line, _STYLES.get(look, "")), soft_wrap=True)


def lines_of(answer: Answer, width: int, details: bool) -> Iterator[Line]:
    for about in answer.about:
        yield from _paragraph(about, width)
    if answer.about:
        yield "", ""
    if answer.is_code:  # which is copied
        yield f"    {plain(answer.headline)}", "strong"
    else:
        yield from ((line, "strong") for line, _ in _paragraph(answer.headline, width))
    facts = () if answer.facts is None else answer.facts.facts
    shown = [fact for fact in (*facts, *answer.commands) if details or not fact.is_detail]
    if not details:
        shown = [replace(fact, value=fact.value + fact.where_short) for fact in shown]
    if shown:
        yield "", ""
        yield from _facts(shown, width)
    for paragraph in answer.paragraphs:
        yield from _paragraph(paragraph, width)
    for section in answer.sections:
        if details or not section.is_detail:
            yield from _section(section, width)
    if answer.notes:
        yield "", ""
    for note in answer.notes:
        yield from _paragraph(f"note: {note}", width, "  ")
    for part in answer.parts:
        yield "", ""
        yield from lines_of(part, width, details)


def _section(section: Section, width: int) -> Iterator[Line]:
    if section.where == "page":
        return
    lines = [line for block in section.blocks for line in _block(block, width)]
    if lines:
        yield "", ""
        if section.title:
            yield section.title, "strong"
        yield from lines


def _block(block: Block, width: int) -> Iterator[Line]:
    if isinstance(block, str):
        yield from _paragraph(block, width)
    elif isinstance(block, Table) and block.rows:
        if block.title:
            yield block.title, "strong"
        yield from table_lines(block, width)
    elif isinstance(block, Facts) and block.facts:
        if block.title:
            yield from _paragraph(block.title, width)
        yield from _facts(block.facts, width)


def _paragraph(text: str, width: int, indent: str = "", first: str = "") -> Iterator[Line]:
    """Yield a paragraph; no word is broken, but long recipes are after plus signs."""
    width = min(WIDTH, width)
    for part in whole_words(plain(text), width - len(indent)).split("\n"):
        for line in textwrap.wrap(
            part,
            width,
            initial_indent=first,
            subsequent_indent=indent,
            break_on_hyphens=False,
            break_long_words=False,
        ):
            yield line, ""
        first = indent


def _facts(facts: Sequence[Fact], width: int) -> Iterator[Line]:
    """Yield facts with their names in a column at the left."""
    room = _GAP + max(8, *(len(plain(fact.name)) for fact in facts))
    before = ""
    for fact in facts:
        name = "" if fact.name == before else plain(fact.name)
        before = fact.name
        if fact.is_command and fact.is_whole:
            yield f"{name:<{room}}{plain(fact.value)}", ""
            continue
        if fact.is_command:
            yield from ((line, "") for line in command_lines(plain(fact.value), name, room))
            continue
        yield from (
            (line, fact.look) for line, _ in _paragraph(fact.line, width, " " * room, f"{name:<{room}}")
        )
        if fact.request:
            yield f"{' ' * room}{plain(fact.request)}", ""


def command_lines(command: str, name: str, room: int) -> Iterator[str]:
    """Yield a command line, broken before options where it is too long, so that it can still be copied."""
    line = f"{name:<{room}}"
    for part in re.split(r" (?=--)", command):
        if len(line) + len(part) > WIDTH - 3 and line.strip() != name:
            yield f"{line}\\"
            line = " " * (room + 4)
        line += f"{part} "
    yield line.rstrip()


def table_lines(table: Table, width: int = PIPE_WIDTH) -> Iterator[Line]:
    """Yield the lines of a table, with the notes on its rows below it. No figure is broken."""
    cells = [[column.name for column in table.columns]]
    cells += [[plain(cell.text) for cell in row.cells] for row in table.rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    kept, room = _fitting(table, widths, width)
    widths[kept[0]] = min(widths[kept[0]], room)
    looks: list[Look] = ["strong", *(row.look for row in table.rows)]
    for texts, look in zip(cells, looks, strict=True):
        label, *rest = broken(texts[kept[0]], widths[kept[0]])
        parts = [label.ljust(widths[kept[0]])]
        for number in kept[1:]:
            is_text = table.columns[number].is_text
            parts.append(
                texts[number].ljust(widths[number]) if is_text else texts[number].rjust(widths[number])
            )
        yield (" " * _GAP).join(parts).rstrip(), look
        yield from ((part, look) for part in rest)
    for row in table.rows:
        if row.notes:
            yield from _paragraph(f"{row.cells[0].text}: {'; '.join(row.notes)}", width, "  ")
    for note in table.note.splitlines():
        yield plain(note), ""


def _fitting(table: Table, widths: Sequence[int], width: int) -> tuple[list[int], int]:
    """Return the columns that fit a width, in characters, and the width left for the first one."""
    kept = table.kept("text")
    least = min(widths[kept[0]], _LEAST_LABEL)
    while True:
        left = width - sum(widths[number] + _GAP for number in kept[1:])
        ranks = {table.columns[number].rank for number in kept}
        if left >= least or ranks == {0}:
            return kept, max(left, min(least, 12))
        kept = [number for number in kept if table.columns[number].rank < max(ranks)]
