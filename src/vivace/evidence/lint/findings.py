"""The findings of `vivace lint`, and the rows that rules read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from vivace.evidence.lint.values import Number

Severity = Literal["impossible", "doubtful"]


@dataclass(frozen=True)
class Finding:
    """One fault of a table.

    Attributes:
        severity: "impossible": the figures contradict each other or the hardware; "doubtful": they can be true, but do
            not show what they seem to.
        row: the number of the line, or of the row in JSON.
    """

    file: Path
    row: int | None
    label: str
    rule: str
    severity: Severity
    numbers: str
    why: str
    check: str
    unit: str = "line"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"file": str(self.file)}


@dataclass(frozen=True)
class Fault:
    """A rule's objection to a row, or to the whole table if `reading` is None."""

    reading: Reading | None
    numbers: str
    why: str
    check: str
    severity: Severity = "impossible"


Rule = Callable[[Sequence["Reading"]], Iterator[Fault]]
"""Takes the rows of a table, and yields their faults."""


@dataclass(frozen=True)
class Reading:
    """The figures of one row, of one GPU if the headings name several.

    Attributes:
        of: the GPU of the headings; empty if they name none.
    """

    line: int
    of: str
    numbers: Mapping[str, Number]
    texts: Mapping[str, str] = field(default_factory=dict)
    section: str = ""
    context: str = ""

    @property
    def label(self) -> str:
        """The row's name: its model and its recipe, and the GPU of its columns."""
        names = [self.section, self.texts.get("model", ""), self.texts.get("label", ""), self.of]
        return ", ".join(dict.fromkeys(name for name in names if name))

    @property
    def all_text(self) -> str:
        return f"{' '.join(self.texts.values())} {self.of} {self.section} {self.context}"

    @property
    def model(self) -> str:
        return self.texts.get("model") or self.section or self.texts.get("label", "")

    @property
    def centre(self) -> str:
        """The role of its time: the median if it has one; "" without any."""
        return self.first("p50", "mean", "time")

    def first(self, *roles: str) -> str:
        """Return the first of some roles that the row has; "" for none."""
        return next((role for role in roles if role in self.numbers), "")

    def has(self, *roles: str) -> bool:
        return all(role in self.numbers for role in roles)

    def __getitem__(self, role: str) -> Number:
        return self.numbers[role]

    def written(self, *roles: str) -> str:
        """Return figures as in "mean 2.05, min 2.09"."""
        return ", ".join(f"{role.replace('_', ' ')} {self[role].text}" for role in roles if self.has(role))

    def fault(
        self, roles: Sequence[str], why: str, check: str, more: str = "", *, sure: bool = True
    ) -> Fault:
        """Object to some of its figures, beside `more`; if that is not sure they are doubtful."""
        return Fault(self, self.written(*roles) + more, why, check, "impossible" if sure else "doubtful")


def is_above(number: Number, other: Number) -> bool:
    """Whether one number is larger than another, whatever their rounding."""
    return number.least > other.most + 1e-12 * abs(other.value)
