"""What one comparison measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from vivace.benchmark.invocation import Invocation
from vivace.report.rows import Row, rows_of
from vivace.spec.figures import QualityPass
from vivace.spec.limits import DEFAULT_LIMITS, Limits
from vivace.spec.record import Record


@dataclass(frozen=True)
class Compared:
    """The records of one comparison, the baseline first, and the metrics of their images.

    Attributes:
        run: that measured them, for the last time; None if they are from no store.
    """

    records: tuple[Record, ...]
    quality: QualityPass
    run: Invocation | None = None
    _rows: dict[Limits, list[Row]] = field(default_factory=dict, compare=False, repr=False)

    def rows(self, limits: Limits = DEFAULT_LIMITS) -> list[Row]:
        """Return each record with its statistics, compared with the baseline and judged by the quality limits."""
        if limits not in self._rows:
            self._rows[limits] = rows_of(list(self.records), self.quality, limits)
        return list(self._rows[limits])
