"""Tables from measured rows: those of a store, and those of the records that ship with vivace."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from vivace.benchmark.store import Store
from vivace.errors import RecipeError
from vivace.evidence.tables import CallParts, CallSpread, EvidenceRow, EvidenceTable, JudgedQuality, Kind
from vivace.foundation.spec.limits import DEFAULT_LIMITS, Limits
from vivace.foundation.spec.recipe_syntax import RecipeSpec
from vivace.foundation.spec.record import Outcome, Record
from vivace.foundation.stats import Interval, Verdict
from vivace.machinery.step_caching.step_cache import StepCache
from vivace.models.find import SYNTHETIC
from vivace.recipes.recipe import Recipe
from vivace.report.fidelity import LOST, KeptShare
from vivace.report.rows import Row
from vivace.techniques.steps import Steps

DISTURBED_BY = "other programs, or a change of the CPU's speed,"
DISTURBED = f"{DISTURBED_BY} disturbed its times"
CPU_MOVED = "the CPU's speed changed between it and the baseline"
ALLOWED_FOR = CPU_MOVED + ", which the interval allows for: the GPU was busy {busy:.0f} % of the time"
DECIDES_ON_NOISE = "with random weights the cache's threshold decides on noise"


def tables_of_store(folder: Path, limits: Limits | None = None) -> list[EvidenceTable]:
    """Return a table for each comparison in a store, the newest first."""
    with Store.read_only(folder) as store:
        return [
            table_of("own", str(folder), compared.rows(limits or DEFAULT_LIMITS))
            for compared in store.comparisons()
        ]


def table_of(
    kind: Kind, place: str, rows: Sequence[Row], given_rows: Sequence[EvidenceRow] | None = None
) -> EvidenceTable:
    """Return the table of rows that were compared with the first."""
    trial, environment = rows[0].record.trial, rows[0].record.environment
    workload = trial.workload
    return EvidenceTable(
        kind=kind,
        place=place,
        model=trial.model.name.removeprefix(SYNTHETIC),
        random_weights=trial.model.is_synthetic,
        device=environment.device,
        gpu=environment.device_name,
        height=workload.height,
        width=workload.width,
        steps=workload.num_inference_steps,
        batch=workload.batch,
        task=workload.task,
        baseline=trial.recipe.text,
        rows=tuple(given_rows if given_rows is not None else (_in_table(row, rows[0]) for row in rows)),
        at=max(r.started_at for row in rows for r in row.record.rounds),
    )


def _in_table(row: Row, baseline: Row) -> EvidenceRow:
    measured = evidence_row_of(row, is_disturbed=row.is_disturbed or baseline.is_disturbed)
    if row.is_disturbed or not row.cpu_differs or row.gpu_busy_s is None or row.latency is None:
        return measured
    warning = ALLOWED_FOR.format(busy=100 * min(1.0, row.gpu_busy_s / row.latency.median.point))
    return measured.model_copy(update={"note": "; ".join((*row.record.rounds[0].warnings, warning))})


def evidence_row_of(
    row: Row,
    latency: Interval | None = None,
    gain: Interval | None = None,
    verdict: Verdict | None = None,
    timed_steps: int | None = None,
    is_disturbed: bool = False,
) -> EvidenceRow:
    """Return a row's figures."""
    record, recipe = row.record, row.record.trial.recipe
    outcome, reason = record.outcome.value, record.reason or ""
    if outcome == "measured" and record.trial.model.is_synthetic and decides_on_values(recipe):
        outcome, reason = "untrusted", DECIDES_ON_NOISE
    memory = row.memory
    if row.latency is not None and outcome == "measured" and is_disturbed:
        reason = DISTURBED
    is_timed = row.latency is not None and outcome == "measured"
    doubts = [reason] if is_timed and reason else [CPU_MOVED] if is_timed and row.cpu_differs else []
    return EvidenceRow(
        recipe=recipe.text,
        label=record.trial.title,
        num_techniques=len(recipe.techniques),
        same_picture=recipe.same_picture,
        outcome=outcome,
        reason=reason,
        latency=(latency or row.latency.median) if is_timed and row.latency else None,
        steps_s=row.stages_s.get("steps") if is_timed and timed_steps is None else None,
        gain=(gain or row.speedup) if is_timed and not is_disturbed else None,
        verdict=(verdict or row.verdict) if is_timed else None,
        peak_bytes=None if memory is None else memory.peak_bytes,
        first_call_s=row.first_call_s,
        batch=record.trial.workload.batch,
        spread=_spread(row) if is_timed and timed_steps is None else None,
        num_rounds=sum(r.outcome is Outcome.MEASURED for r in record.rounds),
        timed_steps=timed_steps,
        calls_s=_few_calls(row) if is_timed and timed_steps is None else (),
        parts=parts_of(record),
        judged=judgement_of(row),
        note="; ".join((*record.rounds[0].warnings, *doubts)),
    )


def _few_calls(row: Row) -> tuple[float, ...]:
    if row.latency is None or row.latency.median.low is not None:
        return ()
    return tuple(round(s, 4) for of_round in row.latency.samples_s for s in of_round)


def parts_of(record: Record) -> CallParts | None:
    """Return the parts of the calls of a record; None for a CPU, for batches and for trained weights."""
    trial = record.trial
    if not trial.model.is_synthetic or trial.workload.batch != 1 or record.environment.device != "cuda":
        return None
    samples = [sample for round_ in record.rounds for sample in round_.samples]
    memories = [round_.memory for round_ in record.rounds if round_.memory is not None]
    if record.outcome is not Outcome.MEASURED or not samples or not memories:
        return None
    steps_s = statistics.median(sample.stages_s["steps"] for sample in samples)
    rest_s = statistics.median(sample.total_s - sample.stages_s["steps"] for sample in samples)
    if any(call.name == Steps.name for call in trial.recipe.techniques):
        rest_s, steps_s = rest_s + steps_s, 0.0
    steps = trial.workload.num_inference_steps
    largest = max(memories, key=lambda memory: memory.peak_bytes)
    return CallParts(steps=steps, rest_s=rest_s, step_s=steps_s / steps, model_bytes=largest.model_bytes)


def decides_on_values(recipe: RecipeSpec) -> bool:
    """Whether a step cache of the recipe compares values, which random weights do not have."""
    try:
        techniques = tuple(Recipe.from_spec(recipe))
    except RecipeError:  # of another version of vivace
        return any(call.knobs.get("threshold") is not None for call in recipe.techniques)
    return any(isinstance(t, StepCache) and not t.is_fixed and bool(t.compared) for t in techniques)


def judgement_of(row: Row) -> JudgedQuality | None:
    if row.judgement is None or row.record.trial.model.is_synthetic:
        return None
    fidelity = row.fidelity
    return JudgedQuality(
        gate=row.judgement.gate,
        reason=row.judgement.reason,
        clip=None if fidelity is None or fidelity.clip is None else fidelity.clip.bounds,
        match=None if fidelity is None or fidelity.match is None else fidelity.match.bounds,
        witness=None if fidelity is None or fidelity.witness is None else fidelity.witness.bounds,
        ssim=None if fidelity is None else fidelity.ssim,
        psnr_db=None if fidelity is None else fidelity.psnr_db,
        num_prompts=0 if fidelity is None else fidelity.num_prompts,
        is_lost=row.judgement.figure == "broken"
        or (fidelity is not None and _is_lost(fidelity.clip, fidelity.match)),
    )


def _is_lost(*kept: KeptShare | None) -> bool:
    return any(
        figure is not None and figure.worst.best < LOST and figure.worst.num_pictures > 1 for figure in kept
    )


def _spread(row: Row) -> CallSpread | None:
    if row.latency is None:
        return None
    samples = list(chain.from_iterable(row.latency.samples_s))
    return CallSpread(
        p50_s=row.latency.median.point,
        min_s=min(samples),
        max_s=max(samples),
        p99_s=row.latency.p99_s,
        num_calls=len(samples),
    )
