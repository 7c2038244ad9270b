"""Tables that owners of cards contributed: the files in results/community/, checked, as they ship with vivace.

`python -m benchmarks.community_tables` writes the file from those under results/community/.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources

from vivace.evidence.committed import TABLES
from vivace.evidence.measured import evidence_row_of, table_of
from vivace.evidence.tables import EvidenceRow, EvidenceTable, JudgedQuality
from vivace.foundation.spec.contribution import Bounds, Closeness, Contributed, Contribution
from vivace.foundation.stats import Gate, Interval
from vivace.report.rows import rows_of

FILE = "community.json"


@cache
def community_tables() -> tuple[EvidenceTable, ...]:
    """Return the tables of the contributions that ship with vivace."""
    return TABLES.validate_json(resources.files("vivace.evidence").joinpath(FILE).read_bytes())


def tables_of(contribution: Contribution, place: str) -> list[EvidenceTable]:
    """Return a table for each comparison of a contribution.

    Args:
        place: the file's name.
    """
    return [_table(contributed, place) for contributed in contribution.comparisons]


def _table(contributed: Contributed, place: str) -> EvidenceTable:
    rows = rows_of([row.record for row in contributed.rows])
    evidence: Sequence[EvidenceRow] = [
        evidence_row_of(row, is_disturbed=row.is_disturbed or rows[0].is_disturbed).model_copy(
            update={"judged": _quality(reported.closeness)}
        )
        for row, reported in zip(rows, contributed.rows, strict=True)
    ]
    return table_of("community", place, rows, evidence)


def _quality(closeness: Closeness | None) -> JudgedQuality | None:
    if closeness is None:
        return None
    gate = Gate(closeness.gate)
    return JudgedQuality(
        gate=gate,
        reason=f"{gate.value} by the figures that were reported",
        clip=_interval(closeness.clip),
        match=_interval(closeness.match),
        ssim=_interval(closeness.ssim),
        psnr_db=_interval(closeness.psnr_db),
        num_prompts=closeness.num_prompts,
    )


def _interval(bounds: Bounds | None) -> Interval | None:
    return None if bounds is None else Interval(*bounds)
