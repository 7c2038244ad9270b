"""The use of a device: the distance from its limit and the causes of the difference, energy, clocks, and cost.

The limit is the time of the recipe's own operations at the measured ceilings, with perfect fusion and without gaps: of
each component the larger of its operations' time and the time to read its weights once a call.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
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


@dataclass(frozen=True)
class GpuUse:
    """The GPU during a row's timed calls, over all rounds. Figures that could not be read are None.

    Attributes:
        energy_j: joules per image, of the whole card: the median of the rounds.
        energy_from: "counter", "sampled power", or both.
        power_w, sm_clock_mhz: the medians of the rounds' mean power and median clock.
        min_sm_clock_mhz, max_temperature_c: of all readings.
    """

    energy_j: float | None
    energy_from: str | None
    power_w: float | None
    sm_clock_mhz: float | None
    min_sm_clock_mhz: float | None
    max_temperature_c: float | None
    throttled: tuple[str, ...]
    reason: str | None

    @property
    def slowed_down(self) -> str | None:
        """Why clocks were held down, apart from the power cap, at which large models usually run; None if they were
        not."""
        return ", ".join(name for name in self.throttled if name != "power cap") or None


def gpu_use(record: Record) -> GpuUse | None:
    windows = [r.gpu for r in record.rounds if r.gpu is not None]
    if not windows:
        return None
    batch = record.trial.workload.batch
    read = [w for w in windows if w.energy_j is not None and w.calls]
    sources = {w.energy_from for w in read if w.energy_from is not None}
    return GpuUse(
        energy_j=_median((w.energy_j or 0.0) / (w.calls * batch) for w in read),
        energy_from=" and ".join(sorted(sources)) or None,
        power_w=_median(w.power_w for w in windows),
        sm_clock_mhz=_median(w.sm_clock_mhz for w in windows),
        min_sm_clock_mhz=min((w.min_sm_clock_mhz for w in windows if w.min_sm_clock_mhz), default=None),
        max_temperature_c=max((w.max_temperature_c for w in windows if w.max_temperature_c), default=None),
        throttled=tuple(dict.fromkeys(name for w in windows for name in w.throttled)),
        reason=None if read else next((w.reason for w in windows if w.reason is not None), None),
    )


def cost_per_1000(median_s: float, price_per_hour: float) -> float:
    """Return the cost of 1,000 images, in the currency of the price, on a machine that is never idle."""
    return 1000 * median_s * price_per_hour / 3600


def _median(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None
