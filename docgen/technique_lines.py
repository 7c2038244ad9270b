"""Rows of docs/techniques-measured.md: what was timed over a few steps is scaled to the model's own number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.every_technique import ROUNDS
from benchmarks.technique_cases import (
    COMMON,
    baseline,
    full_length,
)
from benchmarks.technique_records import by_gpu, key_of, rows_with_baselines, with_baselines
from vivace.foundation.spec.record import Record
from vivace.foundation.stats import Interval, Verdict, learn_spread, log_speedup, median_interval
from vivace.foundation.stats.intervals import DEFAULT_SPREAD, Spread
from vivace.report.host import allowing_for
from vivace.report.rows import Row
from vivace.techniques.distilled import Distilled
from vivace.techniques.steps import Steps

_MOST_PAIRS = 12
"""Recipes may differ in how much their processes do, so each row's own rounds must keep a say."""


@dataclass(frozen=True)
class Line:
    """A measured row at the model's full length: timed so, or scaled to it.

    latency: seconds an image.
    speedup, verdict: over the baseline before it, scaled the same way; None for a baseline.
    """

    row: Row
    steps: int
    latency: Interval
    speedup: Interval | None
    verdict: Verdict | None


def line_of(row: Row, baseline: Row, length: int, spread: Spread = DEFAULT_SPREAD) -> Line:
    """Return a measured row scaled to `length` steps; one whose recipe sets their number as it was timed.

    Args:
        baseline: measured, over as many steps as the row.
        spread: how much processes differ that do the same.
    """
    steps = key_of(row.record)[1]
    theirs = _scaled(baseline, length / steps)
    mine = _scaled(row, 1.0 if sets_steps(row) else length / steps)
    gain = None if row.is_baseline else log_speedup(list(theirs.values()), [mine[k] for k in theirs], spread)
    latency = median_interval(list(mine.values()), spread)
    if gain is None:
        return Line(row, steps, latency, None, None)
    speedup, verdict = allowing_for(row.cpu_stretch or 1.0, gain, len(mine))
    return Line(row, steps, latency, speedup, Verdict.UNCLEAR if waits_for_changed_cpu(row) else verdict)


def sets_steps(row: Row) -> bool:
    """Whether a row's recipe sets the number of steps, whatever is asked for."""
    return any(
        technique.name in (Steps.name, Distilled.name) for technique in row.record.trial.recipe.techniques
    )


def waits_for_changed_cpu(row: Row) -> bool:
    """Whether the GPU is known to wait for long for a CPU whose speed changed, so that the speed-up is the CPU's."""
    return row.cpu_stretch is None and row.gpu_busy_s is not None


def _scaled(row: Row, factor: float) -> dict[int, list[float]]:
    """Return the seconds of each timed call by the index of its round, with its steps scaled by `factor`."""
    return {
        round_.index: [s.total_s + (factor - 1) * s.stages_s.get("steps", 0.0) for s in round_.samples]
        for round_ in row.record.rounds
        if round_.samples
    }


def lines_of(name: str, records: Sequence[Record]) -> list[Line]:
    """Return the best measurement of each recipe, fastest first; at full length if it was timed often enough.

    Those of one GPU stand together.
    """
    parts = by_gpu(records).values()
    return [line for part in parts for line in best_lines(measured_lines(name, part))]


def measured_lines(name: str, records: Sequence[Record]) -> dict[tuple[str, int], Line]:
    """Return the rows of one GPU by recipe and number of steps."""
    measured: dict[tuple[str, int], Line] = {}
    latest: dict[int, Row] = {}
    spread = _spread(name, records)
    for row in rows_with_baselines(records, baseline(name)):
        steps = key_of(row.record)[1]
        if row.is_baseline:
            latest[steps] = row
        if row.latency is not None and latest[steps].latency is not None:
            measured[row.recipe, steps] = line_of(row, latest[steps], full_length(name), spread)
    return measured


def _spread(name: str, records: Sequence[Record]) -> Spread:
    """Return how much processes differ, learnt from the pairs of rounds in which the host does not decide."""
    spread = DEFAULT_SPREAD
    for record, beside in with_baselines(records, baseline(name)):
        own = [call.name for call in record.trial.recipe.techniques]
        if beside is None or COMMON.get(name) not in own or spread.dof >= DEFAULT_SPREAD.dof + _MOST_PAIRS:
            continue
        trials = [
            {r.index: [s.total_s for s in r.samples] for r in timed.rounds} for timed in (beside, record)
        ]
        if all(len(trial) == ROUNDS and all(trial.values()) for trial in trials):
            spread = learn_spread(trials, spread)
    return spread


def best_lines(measured: Mapping[tuple[str, int], Line]) -> list[Line]:
    # Rows at full length need no scaling; but without an interval they cannot be compared.
    ordered = sorted(measured.items(), key=lambda item: (has_interval(item[1]), item[0][1]))
    best = {recipe: line for (recipe, _), line in ordered}
    return sorted(best.values(), key=lambda line: -(line.speedup.point if line.speedup else 1.0))


def has_interval(line: Line) -> bool:
    return (line.speedup or line.latency).low is not None
