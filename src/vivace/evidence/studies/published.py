"""Published numbers: one CSV line for each cell of a source's tables, with its unit.

Columns: study, table, gpu, model, row, recipe, metric, unit, value, note. A value that a source lacks is empty, with
the reason in the note. A contradictory value stays as printed, and the note says so.
"""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from vivace.errors import UsageError
from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.input_errors import in_words
from vivace.foundation.untrusted.files import read_text
from vivace.foundation.untrusted.reading import reading

MAX_BYTES = 10_000_000
FACTORS = {"s": 1.0, "ms": 1e-3, "GB": 1e9, "GiB": 2.0**30, "MB": 1e6, "bytes": 1.0}
"""Factors to seconds or bytes, by unit of time or memory."""
COLUMNS = ("study", "table", "gpu", "model", "row", "recipe", "metric", "unit", "value", "note")

Unit = Literal["s", "ms", "GB", "GiB", "MB", "bytes", "%", "x", "1", "bits", "bool", "text"]


class Published(Spec):
    """One cell of a published table.

    Attributes:
        table: the source's table, in our words.
        gpu: as the source calls it; "" if the cell depends on none.
        model: name of the catalogue; "" if the cell depends on none.
        row: the source's name of the configuration.
        recipe: the equivalent recipe; "" if there is none.
        value: the number, "true", "false" or text; "" if the source has none, with the reason in `note`.
    """

    study: str
    table: str
    gpu: str
    model: str
    row: str = Field(min_length=1)
    recipe: str
    metric: str = Field(min_length=1)
    unit: Unit
    value: str
    note: str

    @model_validator(mode="after")
    def _is_typed(self) -> Published:
        if not self.value:
            if not self.note:
                raise ValueError("an empty value needs its reason in the note")
        elif self.unit == "bool":
            if self.value not in ("true", "false"):
                raise ValueError(f"{self.value!r} must be true or false")
        elif self.unit != "text" and not math.isfinite(float(self.value)):
            raise ValueError(f"{self.value!r} must be a finite number")
        return self

    @property
    def number(self) -> float | None:
        """The value in seconds, bytes or its own unit; None for text, truth values and empty cells."""
        if not self.value or self.unit in ("bool", "text"):
            return None
        return float(self.value) * FACTORS.get(self.unit, 1.0)


def read_published(path: Path) -> tuple[Published, ...]:
    """Read the published numbers of a file.

    Raises:
        UsageError: it cannot be read, or a line is not a cell.
    """
    with reading(path, UsageError, "published names a CSV file beside the study (docs/studies.md)"):
        text = read_text(path, MAX_BYTES)
    return parse_published(text, str(path))


def parse_published(text: str, name: str) -> tuple[Published, ...]:
    """Return the cells of a CSV text.

    Raises:
        UsageError: a line is not a cell; the message names it.
    """
    lines = csv.reader(io.StringIO(text))
    try:
        heading = next(lines, [])
        if tuple(heading) != COLUMNS:
            raise UsageError(f"{name}: the first line must be {','.join(COLUMNS)}")
        cells = []
        for number, line in enumerate(lines, 2):
            if len(line) != len(COLUMNS):
                raise UsageError(f"{name}, line {number}: {len(line)} columns instead of {len(COLUMNS)}")
            try:
                cells.append(Published.model_validate(dict(zip(COLUMNS, line, strict=True))))
            except ValidationError as error:
                raise UsageError(f"{name}, line {number}: {in_words(error)}") from None
    except csv.Error as error:
        raise UsageError(f"{name} is not CSV: {error}") from None
    return tuple(cells)
