"""The figures of a recipe, and of its table, for the requested GPU."""

from __future__ import annotations

from vivace.evidence.recommendation.ranking import Ranked, gain_of
from vivace.evidence.recommendation.recommendation import Basis, RecipeFigures
from vivace.evidence.recommendation.row_filter import RowFilter
from vivace.evidence.recommendation.speed_limit import ChipLimit, chip_limit
from vivace.evidence.recommendation.weighing import RankedTable, projected
from vivace.evidence.tables import EvidenceRow
from vivace.foundation.hardware import Near
from vivace.foundation.stats import Interval


def figures_of(ranked: Ranked, of: RankedTable, judge: RowFilter) -> RecipeFigures:
    """Return a row's figures, with its time on the requested GPU."""
    row, table, criteria = ranked.row, of.table, judge.criteria
    latency = time_here(row, of, judge)
    # Seconds of another model, with steps and a size of its own, are none of this one's.
    is_elsewhere = of.near is not Near.SAME and not of.is_transferred
    is_projected = is_elsewhere and row.predicted_from is None and row.latency is not None
    cost = None
    if criteria.price_per_hour is not None and latency is not None and of.near is Near.SAME:
        cost = criteria.price_per_hour / 3600 * latency.point * 1000
    return RecipeFigures(
        recipe=row.recipe,
        label=row.label,
        batch=row.batch,
        num_techniques=row.num_techniques,
        same_picture=judge.keeps(row, table),
        score=ranked.score,
        gain=gain_of(row, table),
        latency=latency,
        predicted_from=table.gpu if is_projected else row.predicted_from,
        measured_s=row.latency.point if is_projected and row.latency is not None else row.measured_s,
        peak_bytes=row.peak_bytes,
        first_call_s=row.first_call_s,
        spread=row.spread,
        num_rounds=row.num_rounds,
        is_counted=row.is_counted,
        timed_steps=row.timed_steps,
        cost_per_1000=cost,
        judged=judge.judgement_of(row, table),
        note=row.note,
    )


def time_here(row: EvidenceRow, of: RankedTable, judge: RowFilter) -> Interval | None:
    """Return the seconds of a row on the requested GPU, at the answer's number of steps.

    None where no such time is known: another model's, another number of steps, a GPU without data sheet, or a time that
    the chip cannot reach, which must be of something else.
    """
    table = of.table
    latency = row.latency
    if latency is None or of.is_transferred:
        return None
    if table.kind == "published" and table.steps is not None and table.steps != (of.kin.steps or table.steps):
        return None
    is_elsewhere = of.near is not Near.SAME and judge.gpu is not None and table.device != "cpu"
    if is_elsewhere:
        assert judge.gpu is not None
        latency = projected(row, of, judge.gpu)
    limit = limit_of(of, judge)
    if latency is None or limit is None or row.batch > 1 or limit.allows(row.recipe, latency.point):
        return latency
    if not is_elsewhere and row.predicted_from is None:
        return None
    least = limit.least_s(row.recipe)
    return Interval(least, least, max(least, latency.high or least))


def limit_of(of: RankedTable, judge: RowFilter) -> ChipLimit | None:
    """Return the limit of the requested GPU, or of the table's, for a table's number of steps."""
    entry_steps = of.kin.steps if of.table.kind != "own" else of.table.steps
    published = judge.published
    limit = chip_limit(of.kin.architecture, judge.gpu or of.table.gpu, entry_steps)
    sizes = (of.table.height, of.table.width)
    is_own_size = published is not None and sizes in ((None, None), (published.height, published.width))
    return limit if is_own_size and of.table.task == (published.task if published else "text") else None


def basis_of(source: RankedTable, gpu: str | None) -> Basis:
    table = source.table
    name = (
        "any" if gpu is None else {Near.SAME: "same", Near.GENERATION: "generation"}.get(source.near, "other")
    )
    return Basis(
        kind=table.kind,
        place=table.place,
        model=table.model,
        gpu=table.gpu,
        near=name,
        random_weights=table.random_weights,
        baseline=table.baseline,
        height=table.height,
        width=table.width,
        steps=table.steps,
        batch=table.batch,
        device=table.device,
        at=table.at,
        note=table.note,
    )
