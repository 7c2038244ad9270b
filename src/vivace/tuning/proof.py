"""The final that proves an answer: the baseline, the pick and its rivals side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vivace.benchmark.schedule import comparable
from vivace.benchmark.store import Store
from vivace.report.rows import Row, rows_of
from vivace.spec.record import Outcome
from vivace.stats import Interval, Verdict
from vivace.tuning.measuring import Bench
from vivace.tuning.seen import Seen


def final_of(bench: Bench, pick: Seen | None) -> tuple[Row, ...]:
    """Return the rows of the last final; of an earlier run of this search if only that one measured the pick."""
    rows = () if bench.last is None else tuple(bench.last.rows(bench.wanted.limits))
    if pick is not None and not _has(rows, pick):
        rows = _stored(bench, pick) or rows
    return tuple(without_unproved(row) for row in rows)


def without_unproved(row: Row) -> Row:
    """Return the row; of a single round without the speed-up's interval, since its calls share one round's luck."""
    if row.speedup is None or len(row.record.rounds) > 1:
        return row
    return replace(row, speedup=Interval(row.speedup.point, None, None), verdict=Verdict.UNCLEAR)


def _has(rows: Sequence[Row], pick: Seen) -> bool:
    return any(row.recipe == pick.recipe.text and row.latency is not None for row in rows)


def _stored(bench: Bench, pick: Seen) -> tuple[Row, ...]:
    """Return the newest stored final with the pick: same model, machine and prompts, and as many rounds."""
    full = bench.full
    with Store.read_only(bench.store) as store:
        for run in reversed(store.runs()):
            if (run.rounds or 0) < bench.rounds_asked:
                continue
            records = comparable([store.record(key) for key in run.keys], run.rounds)
            if not records or not records[0].trial.recipe.is_baseline:
                continue
            trial, environment = records[0].trial, records[0].environment
            is_same = (
                trial.model == bench.found.model
                and environment.model_copy(update={"place": None}) == bench.environment
                and trial.workload.model_copy(update={"seeds": full.seeds, "sources": full.sources}) == full
                and all(record.outcome is not Outcome.CRASHED for record in records[:1])
            )
            if not is_same:
                continue
            rows = tuple(rows_of(records, store.quality_pass(run), bench.wanted.limits))
            if _has(rows, pick):
                return rows
    return ()
