"""Write what the records under results/ say into the package, for `vivace recommend`.

    python -m benchmarks.committed_tables           write src/vivace/evidence/committed.json
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

from benchmarks import (
    every_model,
    skipped_work,
    step_cases,
    step_curves,
    study_groups,
    technique_cases,
    technique_records,
)
from benchmarks.study_groups import record_file
from benchmarks.technique_cases import RESULTS
from benchmarks.technique_records import key_of, read_records
from docs.technique_lines import lines_of, sets_steps
from vivace.evidence.committed import FILE
from vivace.evidence.measured import evidence_row_of, table_of
from vivace.evidence.studies.expand import expand
from vivace.evidence.studies.sittings import Sitting, run_of
from vivace.evidence.studies.study_file import published_studies, read_study
from vivace.evidence.tables import CallSpread, EvidenceRow, EvidenceTable, JudgedQuality
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.spec.record import Outcome, Record
from vivace.foundation.stats import Interval
from vivace.recipes.resolve import resolve
from vivace.report.rows import Row, rows_of

TARGET = Path(__file__).parents[1] / "src" / "vivace" / "evidence" / FILE
FUSED = [RESULTS / f"flux-fused-{name}.json" for name in ("flux-dev", "flux-schnell")]
"""Prompts are encoded before, so these rows lack the text encoders' time: 25 ms of FLUX.1 [dev]'s 5 s."""
FUSED_APART = RESULTS / "flux-fused-flux2-dev.json"
"""Its baseline is of a run of its own: together they take longer than one sitting."""
DEMO = RESULTS / "demo-cpu.json"
CARDS_DIFFER = 0.03
"""Times of one recipe on two H200s differ by 2 % (docs/performance/flux.md, two cards); a little more is allowed."""
_DIGITS = 4


def content() -> str:
    """Return the tables as JSON, one recipe a line."""
    lines = []
    for table in tables():
        fields = _compact(table.model_dump(mode="json", exclude_defaults=True))
        rows = ",\n".join(json.dumps(row) for row in fields.pop("rows"))
        lines.append(f'{json.dumps(fields)[:-1]}, "rows": [\n{rows}\n]}}')
    return "[\n" + ",\n".join(lines) + "\n]\n"


def tables() -> Iterator[EvidenceTable]:
    """Yield the table of each record and model."""
    for _, group in groupby(read_records(every_model.RECORD), key=lambda record: record.trial.model.name):
        yield _table(every_model.RECORD, rows_of(list(group)))
    for name in technique_cases.FAMILIES:
        for records in technique_records.by_gpu(read_records(technique_cases.record_file(name))).values():
            yield _of_techniques(name, records)
            yield from _of_own_steps(name, records)
    for name in skipped_work.FAMILIES:
        path = skipped_work.record_file(name)
        if records := read_records(path):
            pairs = technique_records.rows_with_baselines(records, technique_cases.baseline(name))
            yield _table(path, _each_once(pairs))
    for path in FUSED:
        yield _of_fused(path)
    base, *others = rows_of(read_records(FUSED_APART))
    yield table_of("committed", _name(FUSED_APART), [base, *others], apart_from(base, others)).model_copy(
        update={"note": "the baseline is of another sitting"}
    )
    for path in sorted(RESULTS.glob("fused-model-*.json")):
        yield _table(path, rows_of(read_records(path)))
    for name in published_studies():
        yield from of_study(study_groups.own(name), record_file(name))
    for name in step_curves.CURVES:
        for device in ("cuda", "cpu"):
            if cases := step_cases.read_cases(step_curves.record_file(name, device)):
                yield _of_curves(name, device, cases)
    yield _of_demo(json.loads(DEMO.read_text(encoding="utf-8")))


def _of_fused(path: Path) -> EvidenceTable:
    """Return the rows of fused FLUX beside the model's own baseline, which another sitting has."""
    rows = rows_of(read_records(path))
    model = rows[0].record.trial.model.name
    beside = [r for r in read_records(every_model.RECORD) if r.trial.model.name == model]
    (base,) = rows_of([r for r in beside if r.trial.recipe.text == BASELINE])
    return table_of("committed", _name(path), [base, *rows], apart_from(base, rows)).model_copy(
        update={
            "note": f"the baseline is that of {_name(every_model.RECORD)}, of another sitting, and encodes the prompts "
            "too, which takes FLUX 25 ms"
        }
    )


def apart_from(base: Row, rows: Sequence[Row]) -> list[EvidenceRow]:
    """Return a baseline and rows that were not timed beside it: speed-ups from the times, with what cards differ by."""
    rows_apart = [evidence_row_of(base)]
    for row in rows:
        evidence = evidence_row_of(row)
        if evidence.latency is None or rows_apart[0].latency is None:
            rows_apart.append(evidence)
            continue
        gain = gain_apart(evidence.latency, rows_apart[0].latency)
        rows_apart.append(evidence.model_copy(update={"gain": gain, "verdict": None}))
    return rows_apart


def gain_apart(latency: Interval, baseline: Interval) -> Interval:
    """Return the speed-up of times that were not measured side by side, with what cards of one kind differ by.

    It has no interval where one of the times has none, e.g. that of two calls.
    """
    point = baseline.point / latency.point
    if baseline.low is None or baseline.high is None or latency.low is None or latency.high is None:
        return Interval(point, None, None)
    low = baseline.low / latency.high / (1 + CARDS_DIFFER)
    return Interval(point, low, baseline.high / latency.low * (1 + CARDS_DIFFER))


def of_study(sittings: Sequence[Sitting], path: Path) -> Iterator[EvidenceTable]:
    """Yield a table for each model, workload, baseline and GPU of a study's record, whose rows are its sittings'.

    Rows of several sittings stand beside the baselines of theirs; the latest libraries count.
    """
    if not sittings:
        return
    name = path.stem.removeprefix("study-")
    is_tiny = not any(sitting.model.is_synthetic for sitting in sittings)
    file = read_study(name)
    by_place: dict[tuple[str, str, str, str], dict[str, Row]] = {}
    for part in run_of(file, expand(file, tiny=is_tiny, synthetic=not is_tiny), sittings).parts:
        for compared in part.compared:
            rows = rows_of(compared.records)
            if rows[0].latency is None:
                continue
            trial, gpu = rows[0].record.trial, rows[0].record.environment.device_name
            key = (trial.model.name, trial.workload.digest(), trial.recipe.text, gpu)
            mine = by_place.setdefault(key, {})
            for row in rows:
                mine.setdefault(row.recipe, row)
    for rows_by_recipe in by_place.values():
        yield _table(path, list(rows_by_recipe.values()))


def _of_curves(name: str, device: str, cases: Mapping[str, step_cases.Case]) -> EvidenceTable:
    """Return the curves of an embedded model. A CPU's times depend on what else runs, so gains are counted there."""
    rows = list(step_cases.rows_with_quality(cases).values())
    table = _table(step_curves.record_file(name, device), rows)
    if device == "cuda":
        return table
    return table.model_copy(update={"rows": tuple(_counted(row, cases) for row in table.rows)})


def _counted(row: EvidenceRow, cases: Mapping[str, step_cases.Case]) -> EvidenceRow:
    work = cases[row.recipe].work
    unknown = {"latency": None, "spread": None, "verdict": None, "first_call_s": None, "note": ""}
    if row.latency is None or row.recipe == BASELINE:
        return row
    if work is None:
        return row.model_copy(update={**unknown, "gain": None, "reason": "its operations were not counted"})
    gain = Interval(1 / work, None, None)
    return row.model_copy(
        update={**unknown, "gain": gain, "is_counted": True, "reason": "", "num_rounds": None}
    )


def _of_demo(rows: Sequence[Mapping[str, Any]]) -> EvidenceTable:
    """Return the table of the demo, whose record is the JSON of its rows."""
    workload, environment = rows[0]["workload"], rows[0]["environment"]
    return EvidenceTable(
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


def _row_of_demo(row: Mapping[str, Any]) -> EvidenceRow:
    latency, gain, quality, fidelity = row["latency"], row["speedup"], row["quality"], row["fidelity"]
    is_judged = not row["is_baseline"] and quality is not None and quality["verdict"] is not None
    return EvidenceRow(
        recipe=row["recipe"],
        num_techniques=len(resolve(row["recipe"]).techniques),
        same_picture=row["same_picture"],
        latency=_interval(latency, "median_s", "ci95_s"),
        gain=_interval(gain, "ratio", "ci95"),
        verdict=None if gain is None else gain["verdict"],
        peak_bytes=row["memory"]["peak_bytes"],
        first_call_s=row["first_call_s"],
        spread=CallSpread(
            p50_s=latency["median_s"], min_s=latency["min_s"], max_s=latency["max_s"], num_calls=latency["n"]
        ),
        num_rounds=row["rounds"],
        judged=JudgedQuality(
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


def _interval(figure: Mapping[str, Any] | None, point: str, ends: str) -> Interval | None:
    return None if figure is None else Interval(figure[point], *(figure[ends] or (None, None)))


def _bounds(figure: Mapping[str, Any] | None) -> Interval | None:
    """Return what the gate compares with a limit. Older records have a 90 % interval."""
    return _interval(figure, "mean", "bounds" if figure is None or "bounds" in figure else "ci90")


def _of_techniques(name: str, records: Sequence[Record]) -> EvidenceTable:
    """Return every technique on a model and GPU, at the model's own number of steps."""
    path = technique_cases.record_file(name)
    full = technique_cases.full_length(name)
    lines = sorted(lines_of(name, records), key=lambda line: not line.row.is_baseline)
    lines = [line for line in lines if not _is_of_own_table(line.row, full)]
    rows = [
        evidence_row_of(
            line.row, line.latency, line.speedup, line.verdict, line.steps if line.steps != full else None
        )
        for line in lines
    ]
    timed = {row.recipe for row in rows}
    failed = [
        evidence_row_of(row)
        for row in technique_records.rows_with_baselines(records, technique_cases.baseline(name))
        if row.record.outcome is not Outcome.MEASURED
        and row.record.trial.recipe.text not in timed
        and not _is_of_own_table(row, full)
    ]
    table = table_of("committed", _name(path), [line.row for line in lines], [*rows, *_once(failed)])
    return table.model_copy(update={"steps": full})


def _of_own_steps(name: str, records: Sequence[Record]) -> Iterator[EvidenceTable]:
    """Yield tables of recipes that set the number of steps, beside the baseline of as many as they were asked for.

    A share of 50 steps is another share of 30, so these rows are not scaled.
    """
    full = technique_cases.full_length(name)
    rows = technique_records.rows_with_baselines(records, technique_cases.baseline(name))
    own = [row for row in rows if _is_of_own_table(row, full)]
    for steps in sorted({key_of(row.record)[1] for row in own}):
        base = [row for row in rows if row.is_baseline and key_of(row.record)[1] == steps]
        mine = [row for row in own if key_of(row.record)[1] == steps]
        yield _table(technique_cases.record_file(name), _each_once([*base, *mine]))


def _is_of_own_table(row: Row, full: int) -> bool:
    return key_of(row.record)[1] != full and sets_steps(row)


def _table(path: Path, rows: Sequence[Row]) -> EvidenceTable:
    return table_of("committed", _name(path), rows)


def _name(path: Path) -> str:
    return f"{RESULTS.name}/{path.name}"


def _each_once(rows: Iterable[Row]) -> list[Row]:
    """Return the last row of each recipe, the baseline first."""
    last_by_recipe = {row.recipe: row for row in rows}
    return sorted(last_by_recipe.values(), key=lambda row: not row.is_baseline)


def _once(rows: Iterable[EvidenceRow]) -> list[EvidenceRow]:
    return list({row.recipe: row for row in rows}.values())


def _compact(value: Any) -> Any:
    """Round floats to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _compact(item) for key, item in value.items()}
    return [_compact(item) for item in value] if isinstance(value, list) else value


def main() -> int:
    """Write the file, or check it."""
    if "--check" in sys.argv[1:]:
        return 0 if TARGET.read_text(encoding="utf-8") == content() else 1
    TARGET.write_text(content(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
