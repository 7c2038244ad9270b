"""The figures of a study's tables, and columns of them: those of a published GPU, or of one measured device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from vivace.evidence.studies.published import Published
from vivace.foundation.spec.record import Outcome
from vivace.foundation.stats import Interval
from vivace.report.rows import Row


@dataclass(frozen=True)
class Figure:
    """A figure of a row.

    Attributes:
        kind: "time" (seconds), "memory" (bytes) or "number".
        of: the figure of a measured row; None if it has none.
        missing: why a measured row has none.
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
        name: the GPU as the source calls it, or the device that measured.
        kind: "published" or "measured".
        cells: by part, model, row and figure. Models are those of the study file, also where others replaced them.
        rows: the measured rows by part, model and row.
        baselines: the baseline's rows by part and model, one for each GPU or host that measured.
    """

    name: str
    kind: Literal["published", "measured"]
    cells: Mapping[tuple[str, str, str, str], StudyCell]
    rows: Mapping[tuple[str, str, str], Row] = field(default_factory=dict)
    baselines: Mapping[tuple[str, str], tuple[Row, ...]] = field(default_factory=dict)

    def cell(self, part: str, model: str, row: str, figure: str) -> StudyCell:
        return self.cells.get((part, model, row, figure), ABSENT)


def _exact(value: float | None) -> Interval | None:
    return None if value is None else Interval(value, None, None)


def _alone(name: str, scale: float = 1.0) -> Callable[[Row], Interval | None]:
    def of(row: Row) -> Interval | None:
        fidelity = None if row.fidelity is None else row.fidelity.alone.get(name)
        return None if fidelity is None else _exact(fidelity.mean * scale)

    return of


def _step(row: Row) -> Interval | None:
    if row.latency is None or not row.num_denoiser_calls:
        return None
    return _exact(row.stages_s["steps"] / row.num_denoiser_calls)


_NOT_TIMED = "not timed"
_NO_QUALITY = "no quality pass: random weights, or quality was not asked for"
FIGURES: dict[str, Figure] = {
    "latency": Figure("s/image", "time", lambda row: row.latency.median if row.latency else None, _NOT_TIMED),
    "mean": Figure(
        "mean s/image", "time", lambda row: _exact(row.latency.mean_s) if row.latency else None, _NOT_TIMED
    ),
    "min": Figure(
        "min s/image", "time", lambda row: _exact(row.latency.min_s) if row.latency else None, _NOT_TIMED
    ),
    "p50": Figure("p50 s/image", "time", lambda row: row.latency.median if row.latency else None, _NOT_TIMED),
    "p90": Figure(
        "p90 s/image",
        "time",
        lambda row: _exact(row.latency.p90_s) if row.latency else None,
        "it needs 20 timed calls",
    ),
    "p99": Figure(
        "p99 s/image",
        "time",
        lambda row: _exact(row.latency.p99_s) if row.latency else None,
        "it needs 200 timed calls",
    ),
    "step": Figure("s/step", "time", _step, _NOT_TIMED),
    "model_memory": Figure(
        "model memory",
        "memory",
        lambda row: _exact(row.memory.model_bytes) if row.memory else None,
        "not measured",
    ),
    "peak_memory": Figure(
        "peak memory",
        "memory",
        lambda row: _exact(row.memory.peak_bytes) if row.memory else None,
        "not measured",
    ),
    "sharpness": Figure("sharpness", "number", _alone("sharpness"), _NO_QUALITY),
    "colourfulness": Figure("colourfulness", "number", _alone("colourfulness"), _NO_QUALITY),
    "entropy": Figure("entropy, bits", "number", _alone("entropy_bits"), _NO_QUALITY),
    "clip": Figure("CLIP score", "number", _alone("clip_score", 0.01), "no CLIP model scored the images"),
}
"""CLIP scores are cosines, as the published ones are; vivace's other tables have them in percent."""


def cell_of(row: Row, figure: str) -> StudyCell:
    """Return a measured row's figure, or the reason why there is none."""
    outcome = row.record.outcome
    if outcome is not Outcome.MEASURED:
        return StudyCell(outcome.value, note=row.record.reason or "")
    value = FIGURES[figure].of(row)
    return StudyCell("measured", value, "" if value is not None else FIGURES[figure].missing)


def published_columns(
    cells: Iterable[Published], parts: Mapping[str, tuple[str, ...]], models: Iterable[str]
) -> list[StudyColumn]:
    """Return one column for each GPU of the source, in its order.

    Args:
        parts: the source's tables that belong to each part; empty for all.
        models: those whose figures are wanted.
    """
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
