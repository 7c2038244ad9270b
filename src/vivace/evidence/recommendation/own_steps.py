"""Times at a model's usual number of steps, where a record timed fewer or more."""

from __future__ import annotations

from vivace.errors import RecipeError
from vivace.evidence.parsed import resolve
from vivace.evidence.recommendation.kin import Kin
from vivace.evidence.tables import EvidenceRow, EvidenceTable
from vivace.foundation.stats import Interval
from vivace.techniques.steps import Steps


def at_own_steps(table: EvidenceTable, kin: Kin) -> EvidenceTable:
    """Return a record of vivace's at the model's own number of steps: each row's steps take proportionally longer.

    A row without the time of its steps in the record, or whose recipe sets their number, has no time and no
    gain there. Tables of other models, the user's own, and published ones stay as they are.
    """
    own = kin.steps
    if table.kind != "committed" or table.model != kin.name or own is None or table.steps in (None, own):
        return table
    assert table.steps is not None
    rows = [_scaled(row, own, table.steps) for row in table.rows]
    base = rows[0].latency
    if base is None:
        return table.model_copy(update={"steps": own, "rows": tuple(rows)})
    with_gains = [rows[0], *(_compared(row, base) for row in rows[1:])]
    return table.model_copy(update={"steps": own, "rows": tuple(with_gains)})


def _scaled(row: EvidenceRow, own_steps: int, steps: int) -> EvidenceRow:
    if row.latency is None:
        return row
    if row.steps_s is None or _sets_steps(row.recipe):
        why = f"timed with {steps} steps, whose share of the time is not known"
        if _sets_steps(row.recipe):
            why = f"compared with {steps} steps of the model"
        return row.model_copy(
            update={"outcome": "not comparable", "reason": why, "latency": None, "gain": None}
        )
    factor, timed_steps = own_steps / steps, row.timed_steps or steps
    more = row.steps_s * (factor - 1)
    point = row.latency.point + more
    stretch = point / row.latency.point
    low, high = row.latency.low, row.latency.high
    latency = Interval(
        point, None if low is None else low * stretch, None if high is None else high * stretch
    )
    update = {
        "latency": latency,
        "steps_s": row.steps_s * factor,
        "timed_steps": None if timed_steps == own_steps else timed_steps,
        "spread": None,
    }
    return row.model_copy(update=update)


def _compared(row: EvidenceRow, base: Interval) -> EvidenceRow:
    """Return a row with its gain over the baseline, from the scaled times; with an interval of the same width."""
    if row.latency is None or row.gain is None:
        return row
    point = base.point / row.latency.point
    stretch = point / row.gain.point
    low, high = row.gain.low, row.gain.high
    gain = Interval(point, None if low is None else low * stretch, None if high is None else high * stretch)
    return row.model_copy(update={"gain": gain})


def _sets_steps(recipe: str) -> bool:
    try:
        return any(isinstance(technique, Steps) or technique.trained_steps for technique in resolve(recipe))
    except RecipeError:
        return False
