"""Write what the records under results/ say into the package, for `vivace recommend`.

    python -m benchmarks.committed_tables           write src/vivace/advice/committed.json
    python -m benchmarks.committed_tables --check   exit 1 if it is not current

Records of full-size models have random weights; those of the embedded models have images. A row that was timed over
fewer steps than the model's own is scaled to them, as on docs/techniques-measured.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import every_model, every_technique, skipped_work, step_curves
from benchmarks.every_technique import RESULTS, read_records
from docs.techniques_measured import lines_of
from vivace.advice.committed import FILE
from vivace.advice.evidence import Judged, Seen, Spread, Table
from vivace.advice.measured import seen_of, table_of
from vivace.recipes.resolve import resolve
from vivace.report.rows import Row, rows_of
from vivace.spec.recipe import BASELINE
from vivace.spec.record import Outcome, Record
from vivace.stats import Interval

TARGET = Path(__file__).parents[1] / "src" / "vivace" / "advice" / FILE
DEMO = RESULTS / "demo-cpu.json"
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
            if cases := step_curves.read_cases(step_curves.record_file(name, device)):
                yield _of_curves(name, device, cases)
    yield _of_demo(json.loads(DEMO.read_text()))


def _of_curves(name: str, device: str, cases: Mapping[str, step_curves.Case]) -> Table:
    """Return the curves of an embedded model. A CPU's times depend on what else runs, so gains are counted there."""
    rows = list(step_curves.rows_with_quality(cases).values())
    table = _table(step_curves.record_file(name, device), rows)
    if device == "cuda":
        return table
    return table.model_copy(update={"rows": tuple(_counted(seen, cases) for seen in table.rows)})


def _counted(seen: Seen, cases: Mapping[str, step_curves.Case]) -> Seen:
    work = cases[seen.recipe].work
    unknown = {"latency": None, "spread": None, "verdict": None, "first_call_s": None, "note": ""}
    if seen.latency is None or seen.recipe == BASELINE:
        return seen
    if work is None:
        return seen.model_copy(update={**unknown, "gain": None, "reason": "its operations were not counted"})
    gain = Interval(1 / work, None, None)
    return seen.model_copy(
        update={**unknown, "gain": gain, "is_counted": True, "reason": "", "num_rounds": None}
    )


def _of_demo(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of the demo, whose record is the JSON of its rows."""
    workload, environment = rows[0]["workload"], rows[0]["environment"]
    return Table(
        kind="committed",
        place=_name(DEMO),
        model=rows[0]["model"],
        device=environment["device"],
        gpu=environment["device_name"],
        height=workload["height"],
        width=workload["width"],
        steps=workload["num_inference_steps"],
        baseline=rows[0]["recipe"],
        rows=tuple(map(_row_of_demo, rows)),
    )


def _row_of_demo(row: Mapping[str, Any]) -> Seen:
    latency, gain, quality, fidelity = row["latency"], row["speedup"], row["quality"], row["fidelity"]
    is_judged = not row["is_baseline"] and quality is not None and quality["verdict"] is not None
    return Seen(
        recipe=row["recipe"],
        num_techniques=len(resolve(row["recipe"]).techniques),
        same_picture=row["same_picture"],
        latency=_interval(latency, "median_s", "ci95_s"),
        gain=_interval(gain, "ratio", "ci95"),
        verdict=None if gain is None else gain["verdict"],
        peak_bytes=row["memory"]["peak_bytes"],
        first_call_s=row["first_call_s"],
        spread=Spread(
            p50_s=latency["median_s"], min_s=latency["min_s"], max_s=latency["max_s"], num_calls=latency["n"]
        ),
        num_rounds=row["rounds"],
        judged=Judged(
            gate=quality["verdict"],
            reason=quality["reason"],
            clip=_bounds(fidelity["clip_bounds"]),
            match=_bounds(fidelity["match_bounds"]),
            ssim=_interval(fidelity["ssim"], "mean", "ci95"),
            num_prompts=fidelity["num_prompts"],
        )
        if is_judged
        else None,
    )


def _interval(found: Mapping[str, Any] | None, point: str, ends: str) -> Interval | None:
    return None if found is None else Interval(found[point], *(found[ends] or (None, None)))


def _bounds(found: Mapping[str, Any] | None) -> Interval | None:
    """Return what the gate compares with a limit. Older records have a 90 % interval."""
    return _interval(found, "mean", "bounds" if found is None or "bounds" in found else "ci90")


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
