"""Faults that rules report, and comparisons that allow for rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vivace.evidence.lint.findings import Reading, Severity
from vivace.evidence.lint.values import Number


@dataclass(frozen=True)
class Fault:
    """A rule's objection to a row, or to the whole table if `reading` is None."""

    reading: Reading | None
    numbers: str
    why: str
    check: str
    severity: Severity = "impossible"


Rule = Callable[[Sequence[Reading]], Iterator[Fault]]
"""Takes the rows of a table, and yields their faults."""


def written(reading: Reading, *roles: str) -> str:
    """Return figures as in "mean 2.05, min 2.09"."""
    return ", ".join(f"{role.replace('_', ' ')} {reading[role].text}" for role in roles if reading.has(role))


def is_above(number: Number, other: Number) -> bool:
    """Whether one number is larger than another, whatever their rounding."""
    return number.least > other.most + 1e-12 * abs(other.value)
