"""The columns and cells of a table that were read, and the others with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_EXAMPLES = 3


@dataclass
class Coverage:
    """The coverage of a table, or of several tables of a file with the same headings.

    Attributes:
        place: the number of the line or row where the table begins; None for an empty one.
        read: what each column means by its heading (a key of `columns.SYNONYMS`), figures and texts.
        unread: what was not read, by heading or place, and why.
        figures: how many cells with figures were read.
        is_ambiguous: some figures can be read in two ways; only what is wrong in both was reported.
    """

    file: Path
    headings: tuple[str, ...]
    place: int | None
    unit: str = "line"
    read: dict[str, str] = field(default_factory=dict)
    unread: list[tuple[str, str]] = field(default_factory=list)
    figures: int = 0
    is_ambiguous: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the coverage as plain data."""
        return {
            "file": str(self.file), self.unit: self.place, "read": self.read, "figures": self.figures,
            "unread": [{"what": what, "why": why} for what, why in self.unread],
        }  # fmt: skip

    @property
    def where(self) -> str:
        """The file, and the line where the table begins."""
        if self.place is None:
            return str(self.file)
        return (
            f"{self.file}:{self.place}" if self.unit == "line" else f"{self.file}, {self.unit} {self.place}"
        )

    def read_in_words(self) -> str:
        """Describe the columns that were read, and their meanings."""
        names = [f"{heading} ({role.replace('_', ' ')})" for heading, role in self.read.items()]
        return f"read {', '.join(names)}"

    def warnings(self) -> list[str]:
        """Describe the columns and cells that were not read, and those that are ambiguous."""
        lines = []
        by_reason: dict[str, list[str]] = {}
        for what, why in self.unread:
            by_reason.setdefault(why, []).append(what)
        unread = [f"{', '.join(filter(None, whats))}: {why}".lstrip(": ") for why, whats in by_reason.items()]
        if unread:
            what = "not read" if self.figures else "nothing was read"
            lines.append(f"{what}: {'; '.join(unread)}")
        if self.is_ambiguous:
            lines.append(
                "figures such as 1,234 can be 1234 or 1.234 here; only what is wrong in both cases is reported"
            )
        return lines


def merged(parts: Iterable[Coverage]) -> list[Coverage]:
    """Return one coverage for all tables of a file with the same headings, such as those in each object of a JSON."""
    whole: dict[tuple[Path, tuple[str, ...]], Coverage] = {}
    for part in parts:
        first = whole.setdefault((part.file, part.headings), part)
        if first is not part:
            first.figures += part.figures
            first.unread += [each for each in part.unread if each not in first.unread]
            first.is_ambiguous |= part.is_ambiguous
    return list(whole.values())


def examples(cells: Sequence[str]) -> str:
    """Return some of the cells that were not read, and how many there are."""
    distinct = list(dict.fromkeys(cells))
    more = f" and {len(distinct) - _EXAMPLES} more" if len(distinct) > _EXAMPLES else ""
    return ", ".join(repr(cell[:40]) for cell in distinct[:_EXAMPLES]) + more
