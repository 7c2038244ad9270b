"""The figures of a study's tables, and columns of them: those of a published GPU, or of one measured device."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from vivace.errors import UsageError
from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.input_errors import in_words
from vivace.foundation.spec.record import Outcome
from vivace.foundation.stats import Interval
from vivace.report.rows import Row

MAX_BYTES = 10_000_000
"""Of a file of published numbers."""
FACTORS = {"s": 1.0, "ms": 1e-3, "GB": 1e9, "GiB": 2.0**30, "MB": 1e6, "bytes": 1.0}
"""Factors to seconds or bytes, by unit of time or memory."""
COLUMNS = ("study", "table", "gpu", "model", "row", "recipe", "metric", "unit", "value", "note")
Unit = Literal["s", "ms", "GB", "GiB", "MB", "bytes", "%", "x", "1", "bits", "bool", "text"]


# Columns: study, table, gpu, model, row, recipe, metric, unit, value, note. A value that a source lacks is empty, with
# the reason in the note. A contradictory value stays as printed, and the note says so.
class Published(Spec):
    """One cell of a published table.

    Attributes:
        table: the source's table, in our words.
        row: the source's name of the configuration.
        recipe: the equivalent recipe; "" if there is none.
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


@dataclass(frozen=True)
class Figure:
    """A figure of a row.

    Attributes:
        kind: "time" (seconds), "memory" (bytes) or "number".
    """

    title: str
    kind: Literal["time", "memory", "number"]
    of: Callable[[Row], Interval | None]
    missing: str


@dataclass(frozen=True)
class StudyCell:
    """One figure of one row in one column.

    Attributes:
        value: the figure; None if there is none, with the reason in `note`.
        outcome: "published", or how the trial ended: "measured", "unsupported", "out_of_memory", ...; "refused" for
            a recipe whose techniques conflict, "absent" where nothing is known.
        note: the reason of a missing value, or a remark.
    """

    outcome: str
    value: Interval | None = None
    note: str = ""


ABSENT = StudyCell("absent")


@dataclass(frozen=True)
class StudyColumn:
    """The figures of one source.

    Attributes:
        cells: by part, model, row and figure. Models are those of the study file, also where others replaced them.
        rows: the measured rows by part, model and row.
        baselines: the baseline's rows by part and model, one for each GPU or host that measured.
    """

    name: str
    kind: Literal["published", "measured"]
    cells: dict[tuple[str, str, str, str], StudyCell]
    rows: dict[tuple[str, str, str], Row] = field(default_factory=dict)
    baselines: dict[tuple[str, str], tuple[Row, ...]] = field(default_factory=dict)

    def cell(self, part: str, model: str, row: str, figure: str) -> StudyCell:
        return self.cells.get((part, model, row, figure), ABSENT)


_NO_QUALITY = "no quality pass: random weights, or quality was not asked for"


def _exact(value: float | None) -> Interval | None:
    return None if value is None else Interval(value, None, None)


def _timed(name: str, missing: str = "not timed") -> Figure:
    return Figure(
        f"{name} s/image", "time", lambda row: _exact(getattr(row.latency, f"{name}_s", None)), missing
    )


def _median(title: str) -> Figure:
    return Figure(title, "time", lambda row: row.latency.median if row.latency else None, "not timed")


def _memory(name: str) -> Figure:
    title = f"{name} memory"
    return Figure(
        title, "memory", lambda row: _exact(getattr(row.memory, f"{name}_bytes", None)), "not measured"
    )


def _alone(title: str, name: str, missing: str = _NO_QUALITY, scale: float = 1.0) -> Figure:
    def of(row: Row) -> Interval | None:
        fidelity = None if row.fidelity is None else row.fidelity.alone.get(name)
        return None if fidelity is None else _exact(fidelity.mean * scale)

    return Figure(title, "number", of, missing)


FIGURES: dict[str, Figure] = {
    "latency": _median("s/image"),
    "mean": _timed("mean"),
    "min": _timed("min"),
    "p50": _median("p50 s/image"),
    "p90": _timed("p90", "it needs 20 timed calls"),
    "p99": _timed("p99", "it needs 200 timed calls"),
    "step": Figure("s/step", "time", lambda row: _exact(row.step_s if row.latency else None), "not timed"),
    "model_memory": _memory("model"),
    "peak_memory": _memory("peak"),
    "sharpness": _alone("sharpness", "sharpness"),
    "colourfulness": _alone("colourfulness", "colourfulness"),
    "entropy": _alone("entropy, bits", "entropy_bits"),
    "clip": _alone("CLIP score", "clip_score", "no CLIP model scored the images", 0.01),
}
"""CLIP scores are cosines, as the published ones are; vivace's other tables have them in percent."""


def cell_of(row: Row, figure: str) -> StudyCell:
    outcome = row.record.outcome
    if outcome is not Outcome.MEASURED:
        return StudyCell(outcome.value, note=row.record.reason or "")
    value = FIGURES[figure].of(row)
    return StudyCell("measured", value, "" if value is not None else FIGURES[figure].missing)


def published_columns(
    cells: Iterable[Published], parts: Mapping[str, tuple[str, ...]], models: Iterable[str]
) -> list[StudyColumn]:
    """Return one column for each GPU of the source, in its order."""
    names = set(models)
    by_gpu: dict[str, dict[tuple[str, str, str, str], StudyCell]] = {}
    for cell in cells:
        if not cell.gpu or cell.metric not in FIGURES or cell.model not in names:
            continue
        for part, tables in parts.items():
            if tables and cell.table not in tables:
                continue
            value = _exact(cell.number)
            outcome = "published" if value is not None else "absent"
            by_key = by_gpu.setdefault(cell.gpu, {})
            by_key.setdefault((part, cell.model, cell.row, cell.metric), StudyCell(outcome, value, cell.note))
    return [StudyColumn(gpu, "published", by_key) for gpu, by_key in by_gpu.items()]


def parse_published(text: str, name: str) -> tuple[Published, ...]:
    """Return the cells of a CSV text."""
    try:
        heading, *lines = [*csv.reader(io.StringIO(text))] or [[]]
        if tuple(heading) != COLUMNS:
            raise UsageError(f"{name}: the first line must be {','.join(COLUMNS)}")
        cells = []
        for number, line in enumerate(lines, 2):
            if len(line) != len(COLUMNS):
                raise UsageError(f"{name}, line {number}: {len(line)} columns instead of {len(COLUMNS)}")
            with_names = dict(zip(COLUMNS, line, strict=True))
            try:
                cells.append(Published.model_validate(with_names))
            except ValidationError as error:
                raise UsageError(f"{name}, line {number}: {in_words(error)}") from None
    except csv.Error as error:
        raise UsageError(f"{name} is not CSV: {error}") from None
    return tuple(cells)
