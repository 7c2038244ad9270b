"""An answer as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from vivace.answers.answer import Answer, Block, Fact, Facts, Section, Table
from vivace.foundation.untrusted.streams import markdown_cell, markdown_code_cell, plain

Alignment = Literal["left", "center", "right"]
_RULES: dict[Alignment, str] = {"left": "---", "center": ":-:", "right": "--:"}
_LEFT: Mapping[str, Alignment] = {}


def markdown_of(answer: Answer) -> str:
    return "\n".join(_lines(answer, "##")).rstrip() + "\n"


def _lines(answer: Answer, mark: str) -> Iterator[str]:
    for about in answer.about:
        yield from (markdown_cell(about), "")
    yield from (
        markdown_code_cell(answer.headline) if answer.is_code else f"**{markdown_cell(answer.headline)}**",
        "",
    )
    if answer.facts is not None:
        yield from _facts(answer.facts.facts)
    yield from (line for paragraph in answer.paragraphs for line in (markdown_cell(paragraph), ""))
    for section in answer.sections:
        yield from section_lines(section, mark)
    if answer.notes:
        yield from (*(f"- {markdown_cell(note)}" for note in answer.notes), "")
    if answer.commands:
        yield from ("```bash", *(plain(command.value) for command in answer.commands), "```", "")
    for part in answer.parts:
        yield from _lines(part, mark)


def section_lines(section: Section, mark: str = "##") -> Iterator[str]:
    """Yield the lines of a section; none if only a page has it."""
    lines = [line for block in section.blocks for line in _block(block)]
    if section.where != "page" and lines:
        yield from (f"{mark} {markdown_cell(section.title)}", "") if section.title else ()
        yield from lines


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, str):
        yield from (markdown_cell(block), "")
    elif isinstance(block, Table) and block.rows:
        yield from (f"**{markdown_cell(block.title)}**", "") if block.title else ()
        yield from (*table_markdown(block), "")
        if block.note:
            yield from (*(f"{markdown_cell(line)}  " for line in block.note.splitlines()), "")
    elif isinstance(block, Facts) and block.facts:
        yield from (markdown_cell(block.title), "") if block.title else ()
        yield from _facts(block.facts)


def _facts(facts: Iterable[Fact]) -> Iterator[str]:
    for fact in facts:
        text = markdown_code_cell(fact.value) if fact.is_command else markdown_cell(fact.line)
        yield f"- {markdown_cell(fact.name)}: {text}"
    yield ""


def table_markdown(table: Table) -> list[str]:
    """Return the lines of a table, with a column of notes where rows have any."""
    kept = table.kept("text")
    has_notes = any(row.notes for row in table.rows)
    rows = []
    for row in table.rows:
        cells = [markdown_cell(row.cells[number].text) for number in kept]
        cells[0] = markdown_code_cell(row.cells[kept[0]].text) if table.is_code else cells[0]
        rows.append([*cells, *([markdown_cell("; ".join(row.notes))] if has_notes else [])])
    headings = [markdown_cell(table.columns[number].name) for number in kept]
    return markdown_lines([*headings, *(["notes"] if has_notes else [])], rows)


def markdown_lines(
    headings: Sequence[str], rows: Iterable[Sequence[str]], aligned: Mapping[str, Alignment] = _LEFT
) -> list[str]:
    """Return a table in Markdown; the cells are Markdown already."""
    rules = [_RULES[aligned.get(heading, "left")] for heading in headings]
    return [f"| {' | '.join(cells)} |" for cells in (headings, rules, *rows)]
