"""The distance of a row from the limit of its device, and the causes of the difference.

The limit is the time of the recipe's own operations at the measured ceilings, with perfect fusion and without gaps: of
each component the larger of its operations' time and the time to read its weights once a call.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from vivace.foundation.spec.ceilings import Ceilings, ComponentWork, Operation
from vivace.foundation.spec.record import Record, Round


@dataclass(frozen=True)
class Limit:
    """Seconds per image. All but `reason` are None or empty where the limit is not known.

    Attributes:
        share: `limit_s` over the median time. More than 1 is an error of the count or of the ceilings.
        kernels_s: in which the GPU is busy beyond the limit; None on a CPU.
        gaps_s: in which the GPU waits for the next kernel while a component is called; None on a CPU.
        outside_s: the pipeline's own work outside of its components; None on a CPU.
    """

    limit_s: float | None = None
    share: float | None = None
    components_s: Mapping[str, float] | None = None
    kernels_s: float | None = None
    gaps_s: float | None = None
    outside_s: float | None = None
    problem: str | None = None
    reason: str | None = None


class _NoCeiling(Exception):
    """An operation of the recipe has no measured ceiling; the message names it."""


def limit_of(record: Record, median_s: float, gpu_busy_s: float | None) -> Limit | None:
    """Return a measured record's limit; None if no ceilings of its device were measured."""
    counted = [r for r in record.rounds if r.ceilings is not None and r.work is not None]
    if not counted:
        return None
    work, ceilings = counted[-1].work, counted[-1].ceilings
    assert work is not None
    assert ceilings is not None
    if not work.components:
        return Limit(reason=f"the work of this recipe was not counted: {work.reason}")
    try:
        parts = {c.component: _component_s(c, ceilings) for c in work.components}
    except _NoCeiling as error:
        return Limit(reason=str(error))
    batch = record.trial.workload.batch
    parts = {name: seconds / batch for name, seconds in parts.items()}
    limit_s = sum(parts.values())
    return _split(limit_s, parts, median_s, gpu_busy_s, _outside_s(record.rounds, batch))


def _split(
    limit_s: float, parts: Mapping[str, float], median_s: float, busy_s: float | None, outside_s: float
) -> Limit:
    """Divide the time of an image into the limit and the losses, without rounding anything away."""
    kernels = gaps = outside = None
    if busy_s is not None:
        waiting = median_s - busy_s
        outside = min(outside_s, max(0.0, waiting))
        kernels, gaps = busy_s - limit_s, waiting - outside
    problem = None
    if limit_s > median_s:
        problem = f"the limit is {limit_s / median_s:.0%} of the measured time"
    elif busy_s is not None and limit_s > busy_s:
        problem = f"the limit is {limit_s / busy_s:.0%} of the time in which the GPU was busy"
    if problem is not None:
        problem += ": the count of operations or the measured ceilings are wrong"
    return Limit(limit_s, limit_s / median_s, parts, kernels, gaps, outside, problem)


def _component_s(work: ComponentWork, ceilings: Ceilings) -> float:
    computing = (
        _at(ceilings, "gemm", work.gemm, work.gemm_flop)
        + _at(ceilings, "gemm", work.conv, work.conv_flop)
        + _at(ceilings, "attention", work.attention, work.attention_flop)
    )
    return max(computing, _at(ceilings, "copy", "", work.computed * work.weights_bytes))


def _at(ceilings: Ceilings, operation: Operation, precision: str, amount: float) -> float:
    if not amount:
        return 0.0
    rate = ceilings.per_s(operation, precision)
    if rate is None:
        name = f"{operation} {precision}".strip()
        why = ceilings.missing.get(name)
        raise _NoCeiling(f"{name} has no measured ceiling" + (f": {why}" if why else ""))
    return amount / rate


def _outside_s(rounds: tuple[Round, ...], batch: int) -> float:
    outside_s = [s.stages_s.get("other", 0.0) / batch for r in rounds for s in r.samples]
    return statistics.median(outside_s) if outside_s else 0.0
