"""Write what the records under results/ say into the package, for `vivace recommend`.

    python -m benchmarks.committed_tables           write src/vivace/evidence/committed.json
    python -m benchmarks.committed_tables --check   exit 1 if it is not current

Records of full-size models have random weights; those of the embedded models have images. A row that was timed over
fewer steps than the model's own is scaled to them, as on docs/techniques-measured.md.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from benchmarks import (
    every_model,
    new_prompts,
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
from docgen.technique_lines import lines_of, sets_steps
from vivace.errors import RecipeError
from vivace.evidence.committed import FILE
from vivace.evidence.measured import evidence_row_of, table_of
from vivace.evidence.studies.expand import expand
from vivace.evidence.studies.sittings import Sitting, run_of
from vivace.evidence.studies.study_file import published_studies, read_study
from vivace.evidence.tables import CallSpread, EvidenceRow, EvidenceTable, JudgedQuality
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.spec.record import Outcome, Record
from vivace.foundation.stats import Interval
from vivace.models.find import SYNTHETIC
from vivace.recipes.resolve import resolve
from vivace.report.rows import Row, rows_of

TARGET = Path(__file__).parents[1] / "src" / "vivace" / "evidence" / FILE
FUSED = ("*fused-*.json", "throughput-*.json", "large-images-*.json")
"""Records of fused models: a row whose own record has no baseline is compared with another's."""
OF_IMAGES = RESULTS / "fused-tiny-sd.json"
"""A record of images, which has no times of a full-size model."""
APART = "its baseline is of another run or card"
ENCODED_BEFORE = "prompts are encoded before the call, the baseline's in it, which takes FLUX 25 ms"
DEMO = RESULTS / "demo-cpu.json"
CARDS_DIFFER = 0.03
"""Times of one recipe on two H200s differ by 2 % (docs/performance/flux.md, two cards); a little more is allowed."""
_DIGITS = 4


def content() -> str:
    """Return the tables as JSON, one recipe a line."""
    lines = []
    for table in tables():
        fields = _compact(table.model_dump(mode="json", exclude_defaults=True))
        rows = ",\n".join(json.dumps(row) for row in fields.pop("rows") if _is_readable(row["recipe"]))
        lines.append(f'{json.dumps(fields)[:-1]}, "rows": [\n{rows}\n]}}')
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _is_readable(recipe: str) -> bool:
    """Whether its techniques still exist: the records keep rows of those that were removed."""
    try:
        resolve(recipe)
    except RecipeError:
        return False
    return True


def tables() -> Iterator[EvidenceTable]:
    """Yield the table of each record and model."""
    for _, group in groupby(read_records(every_model.RECORD), key=lambda record: record.trial.model.name):
        yield table_of_models(rows_of(list(group)))
    for name in technique_cases.FAMILIES:
        for records in technique_records.by_gpu(read_records(technique_cases.record_file(name))).values():
            yield _of_techniques(name, records)
            yield from _of_own_steps(name, records)
    for name in skipped_work.FAMILIES:
        path = skipped_work.record_file(name)
        if records := read_records(path):
            pairs = technique_records.rows_with_baselines(records, technique_cases.baseline(name))
            yield _table(path, _each_once(pairs))
    yield from _of_fused(sorted({path for pattern in FUSED for path in RESULTS.glob(pattern)} - {OF_IMAGES}))
    yield from _of_edits()
    for name in published_studies():
        yield from of_study(study_groups.own(name), record_file(name))
    for name in step_curves.CURVES:
        for device in ("cuda", "cpu"):
            if cases := step_cases.read_cases(step_curves.record_file(name, device)):
                yield _of_curves(name, device, cases)
    yield _of_demo(json.loads(DEMO.read_text(encoding="utf-8")))


def table_of_models(rows: Sequence[Row], path: Path = every_model.RECORD) -> EvidenceTable:
    """Return the table of a model; rows of another card than the baseline's are marked."""
    table = _table(path, rows)
    base = cards_of(rows[0].record)
    marked = [
        evidence
        if cards_of(row.record) <= base
        else evidence.model_copy(update={"note": "; ".join(filter(None, (evidence.note, APART)))})
        for row, evidence in zip(rows, table.rows, strict=True)
    ]
    return table.model_copy(update={"rows": tuple(marked)})


def cards_of(record: Record) -> set[object]:
    """Return which cards a record's rounds were measured on; empty if they did not say."""
    return {card for r in record.rounds if (card := r.conditions.get("gpu_uuid")) is not None}


def _of_fused(paths: Sequence[Path]) -> Iterator[EvidenceTable]:
    """Yield a table for each model, GPU, number of steps and batch of the records of fused models."""
    records = {path: read_records(path) for path in paths}
    elsewhere = [*read_records(every_model.RECORD), *chain.from_iterable(records.values())]
    elsewhere += chain.from_iterable(
        map(read_records, map(technique_cases.record_file, technique_cases.FAMILIES))
    )
    published = [record for record in elsewhere if record.trial.recipe.text == BASELINE]
    for path, mine in records.items():
        groups: dict[tuple[object, ...], list[Record]] = {}
        for record in sorted(mine, key=lambda record: record.trial.recipe.text != BASELINE):
            groups.setdefault(_comparable(record), []).append(record)
        for group in groups.values():
            rows = rows_of(group)
            has_own = rows[0].recipe == BASELINE
            if has_own and all(row.speedup is None or row.speedup.low is not None for row in rows):
                yield _table(path, rows)
            elif others := [rows_of([record])[0] for record in group[has_own:]]:
                base = rows[0] if has_own else _baseline_for(group[0], published)
                if base is not None:
                    yield _apart(path, base, others)


def _of_edits() -> Iterator[EvidenceTable]:
    """Yield a table for each model that edits, of the fastest time of a known prompt, beside the published one."""
    published = [
        record for record in read_records(every_model.RECORD) if record.trial.recipe.text == BASELINE
    ]
    for record in published:
        if record.trial.workload.task != "edit":
            continue
        (base,) = rows_of([record])
        cases = [
            case
            for case in new_prompts.read(new_prompts.RECORD)
            if case["model"] == record.trial.model.name
            and case["steps"] == technique_cases.full_length(case["model"].removeprefix(SYNTHETIC))
            and case["environment"]["device_name"] == record.environment.device_name
            and case["images"] == 1
            and resolve(case["recipe"]).same_picture
        ]
        if cases and base.latency is not None:
            case = min(cases, key=lambda case: statistics.median(case["known_s"]))
            start = _at_steps(base, case["steps"])
            table = table_of("committed", _name(new_prompts.RECORD), [base], [start])
            yield table.model_copy(
                update={"rows": (start, _row_of_edit(case, start)), "steps": case["steps"]}
            )


def _row_of_edit(case: Mapping[str, Any], start: EvidenceRow) -> EvidenceRow:
    seconds = sorted(case["known_s"])
    recipe, middle = resolve(case["recipe"]), statistics.median(seconds)
    return EvidenceRow(
        recipe=recipe.text,
        num_techniques=len(recipe.techniques),
        same_picture=True,
        latency=Interval(middle, None, None),
        gain=gain_apart(Interval(middle, seconds[0], seconds[-1]), _with_ends(start)),
        peak_bytes=case.get("peak_bytes"),
        spread=CallSpread(p50_s=middle, min_s=seconds[0], max_s=seconds[-1], num_calls=len(seconds)),
        num_rounds=1,
        note=APART,
    )


def _comparable(record: Record) -> tuple[object, ...]:
    workload = record.trial.workload
    return (
        record.trial.model.name, record.environment.device_name, workload.height, workload.num_inference_steps,
        workload.batch, workload.task,
    )  # fmt: skip


def _baseline_for(record: Record, published: Sequence[Record]) -> Row | None:
    """Return the model as published on such a GPU, best with as many steps; None if no record has it."""
    key = _comparable(record)
    alike = [
        row
        for other in published
        if _comparable(other)[:3] == key[:3] and (row := rows_of([other])[0]).latency is not None
    ]
    steps = record.trial.workload.num_inference_steps
    return min(alike, key=lambda row: row.record.trial.workload.num_inference_steps != steps, default=None)


def _apart(path: Path, base: Row, rows: Sequence[Row]) -> EvidenceTable:
    """Return the table of rows that were not timed beside their baseline, at their number of steps."""
    workload = rows[0].record.trial.workload
    start = _at_steps(base, workload.num_inference_steps)
    given = [start, *(_row_apart(row, start) for row in rows)]
    return table_of("committed", _name(path), [base, *rows], given).model_copy(
        update={"steps": workload.num_inference_steps, "batch": workload.batch}
    )


def _at_steps(row: Row, steps: int) -> EvidenceRow:
    """Return a row's time at a number of steps, which is scaled if it was timed at another."""
    evidence, timed = evidence_row_of(row), row.record.trial.workload.num_inference_steps
    if timed == steps:
        return evidence
    assert evidence.parts is not None
    assert evidence.latency is not None
    steps_s = evidence.parts.step_s * steps
    latency = around(evidence.latency, evidence.parts.rest_s + steps_s)
    return evidence.model_copy(
        update={"latency": latency, "steps_s": steps_s, "timed_steps": timed, "spread": None}
    )


def around(latency: Interval, point: float) -> Interval:
    """Return an interval as wide as another, around another point."""
    factor = point / latency.point
    low, high = latency.low, latency.high
    return Interval(point, None if low is None else low * factor, None if high is None else high * factor)


def _row_apart(row: Row, start: EvidenceRow) -> EvidenceRow:
    evidence = evidence_row_of(row)
    if evidence.latency is None or start.latency is None:
        return evidence
    notes = [evidence.note, APART] + [ENCODED_BEFORE] * (row.record.trial.workload.text == "embeddings")
    gain = gain_apart(_with_ends(evidence), _with_ends(start))
    return evidence.model_copy(update={"gain": gain, "verdict": None, "note": "; ".join(filter(None, notes))})


def _with_ends(row: EvidenceRow) -> Interval:
    """Return a row's time; where two calls leave no interval, from the shortest call to the longest."""
    assert row.latency is not None
    if row.latency.low is not None or row.spread is None:
        return row.latency
    return Interval(row.latency.point, row.spread.min_s, row.spread.max_s)


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
