"""Write what owners of cards contributed into the package, for `vivace recommend`.

python -m benchmarks.community_tables           write src/vivace/evidence/community.json
python -m benchmarks.community_tables --check   exit 1 if it is not current
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from vivace.evidence.committed import COMMUNITY_FILE, TABLES
from vivace.evidence.lint.read_tables import read_contribution
from vivace.evidence.measured import evidence_row_of, table_of
from vivace.evidence.tables import EvidenceRow, EvidenceTable, JudgedQuality
from vivace.foundation.spec.contribution import MAX_BYTES, Bounds, Closeness, Contributed, Contribution
from vivace.foundation.stats import Gate, Interval
from vivace.foundation.untrusted.files import read_object
from vivace.report.rows import rows_of

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "results" / "community"
TARGET = ROOT / "src" / "vivace" / "evidence" / COMMUNITY_FILE


def content() -> str:
    """Return the tables of all contributions, as JSON."""
    tables = []
    for path in sorted(FOLDER.glob("*.json")):
        tables += tables_of(read_contribution(read_object(path, MAX_BYTES)), path.name)
    return TABLES.dump_json(tuple(tables), indent=1, exclude_defaults=True).decode() + "\n"


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


def main() -> int:
    is_current = TARGET.read_text(encoding="utf-8") == content()
    if "--check" in sys.argv:
        return 0 if is_current else 1
    TARGET.write_text(content(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
