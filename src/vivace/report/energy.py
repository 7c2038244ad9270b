"""Energy per image and the state of the GPU over the timed calls."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from vivace.foundation.spec.record import Record


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
