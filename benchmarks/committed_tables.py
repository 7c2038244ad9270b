"""Write what the records under results/ say into the package, for `vivace recommend`.

    python -m benchmarks.committed_tables           write src/vivace/advice/committed.json
    python -m benchmarks.committed_tables --check   exit 1 if it is not current

Records of full-size models have random weights; those of the embedded models have images. A row that was timed over
fewer steps than the model's own is scaled to them, as on docs/techniques-measured.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import every_model, every_technique, skipped_work, step_curves
from benchmarks.every_technique import RESULTS, read_records
from docs.techniques_measured import lines_of
from vivace.advice.committed import FILE
from vivace.advice.evidence import Seen, Table
from vivace.advice.measured import seen_of, table_of
from vivace.report.rows import Row, rows_of
from vivace.spec.record import Outcome, Record

TARGET = Path(__file__).parents[1] / "src" / "vivace" / "advice" / FILE
_DIGITS = 4


def content() -> str:
    """Return the tables as JSON, one recipe a line."""
    lines = []
    for table in tables():
        found = _compact(table.model_dump(mode="json", exclude_defaults=True))
        rows = ",\n".join(json.dumps(row) for row in found.pop("rows"))
        lines.append(f'{json.dumps(found)[:-1]}, "rows": [\n{rows}\n]}}')
    return "[\n" + ",\n".join(lines) + "\n]\n"


def tables() -> Iterator[Table]:
    """Yield the table of each record and model."""
    for _, group in groupby(read_records(every_model.RECORD), key=lambda record: record.trial.model.name):
        yield _table(every_model.RECORD, rows_of(list(group)))
    for name in every_technique.FAMILIES:
        if records := read_records(every_technique.record_file(name)):
            yield _of_techniques(name, records)
    for name in skipped_work.FAMILIES:
        path = skipped_work.record_file(name)
        if records := read_records(path):
            found = every_technique.rows_with_baselines(records, every_technique.baseline(name))
            yield _table(path, _each_once(found))
    for name in step_curves.CURVES:
        for device in ("cuda", "cpu"):
            path = step_curves.record_file(name, device)
            if rows := list(step_curves.rows_with_quality(step_curves.read_cases(path)).values()):
                yield _table(path, rows)


def _of_techniques(name: str, records: Sequence[Record]) -> Table:
    """Return every technique on a model, at the model's own number of steps."""
    path = every_technique.record_file(name)
    full = every_technique.full_length(name)
    lines = sorted(lines_of(name, records), key=lambda line: not line.row.is_baseline)
    seen = [
        seen_of(
            line.row, line.latency, line.speedup, line.verdict, line.steps if line.steps != full else None
        )
        for line in lines
    ]
    timed = {one.recipe for one in seen}
    failed = [
        seen_of(row)
        for row in every_technique.rows_with_baselines(records, every_technique.baseline(name))
        if row.record.outcome is not Outcome.MEASURED and row.record.trial.recipe.text not in timed
    ]
    table = table_of("committed", _name(path), [line.row for line in lines], [*seen, *_once(failed)])
    return table.model_copy(update={"steps": full})


def _table(path: Path, rows: Sequence[Row]) -> Table:
    return table_of("committed", _name(path), rows)


def _name(path: Path) -> str:
    return f"{RESULTS.name}/{path.name}"


def _each_once(rows: Iterable[Row]) -> list[Row]:
    """Return the last row of each recipe, the baseline first."""
    found = {row.recipe: row for row in rows}
    return sorted(found.values(), key=lambda row: not row.is_baseline)


def _once(seen: Iterable[Seen]) -> list[Seen]:
    return list({one.recipe: one for one in seen}.values())


def _compact(value: Any) -> Any:
    """Round floats to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _compact(one) for key, one in value.items()}
    return [_compact(one) for one in value] if isinstance(value, list) else value


def main() -> int:
    """Write the file, or check it."""
    if "--check" in sys.argv[1:]:
        return 0 if TARGET.read_text() == content() else 1
    TARGET.write_text(content())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
