"""What one comparison measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from vivace.foundation.spec.figures import QualityPass
from vivace.foundation.spec.limits import DEFAULT_LIMITS, Limits
from vivace.foundation.spec.record import Record
from vivace.measure.witness_limits import calibrated_limits, limit_notes
from vivace.report.rows import Row, rows_of


@dataclass(frozen=True)
class Compared:
    """The records of one comparison, the baseline first, and the metrics of their images; `run` is the last that
    measured them."""

    records: tuple[Record, ...]
    quality: QualityPass
    run: Invocation | None = None
    _rows: dict[Limits, list[Row]] = field(default_factory=dict, compare=False, repr=False)

    def rows(self, limits: Limits = DEFAULT_LIMITS) -> list[Row]:
        """Return each record with its statistics, compared with the baseline and judged by the quality limits.

        For records from a store, limits that are not set are those that `vivace calibrate witness` chose on this
        machine, if any. Published records are judged the same everywhere.
        """
        if limits not in self._rows:
            used = limits
            if self.run is not None:
                used = calibrated_limits(limits, self._model, self.quality.scorer)
            self._rows[limits] = rows_of(list(self.records), self.quality, used)
        return list(self._rows[limits])

    def limit_notes(self, limits: Limits = DEFAULT_LIMITS) -> list[str]:
        """Return the sources of the limits of the models that judge images, where the user set none."""
        if len(self.records) < 2:  # nothing is judged
            return []
        return limit_notes(self._model, self.quality.scorer, limits)

    @property
    def _model(self) -> str:
        """NAME@REVISION; "" without records."""
        return next((f"{r.trial.model.name}@{r.trial.model.revision}" for r in self.records), "")


class Purpose(StrEnum):
    COMPARISON = "comparison"
    """Recipes that a user named: `vivace bench`."""
    STUDY = "study"
    """A part of a study."""
    PAIRS = "pairs"
    """Two recipes, pair by pair: `vivace compare`."""
    CALIBRATION = "calibration"
    """A setting of a step cache."""
    BASELINE = "baseline"
    """Part of a search: the baseline alone."""
    SCREENING = "screening"
    """Part of a search: a few calls, without quality."""
    JUDGEMENT = "judgement"
    """Part of a search: full steps, with the quality of a few images."""
    FINAL = "final"
    """Part of a search: interleaved with the baseline, in several rounds."""
    IMAGES = "images"
    """Part of a search: further images of a final's recipes."""


@dataclass(frozen=True)
class Invocation:
    """One run of a comparison.

    Attributes:
        started_at: UTC, ISO 8601.
        keys: of its trials, the baseline first.
        scorer: NAME@REVISION of the CLIP model; None without one.
        rounds: of each trial that were asked for; None in stores of an earlier format.
    """

    started_at: str
    command: str
    keys: tuple[str, ...]
    scorer: str | None = None
    rounds: int | None = None
    purpose: Purpose = Purpose.COMPARISON
