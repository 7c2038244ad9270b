"""Each measured row's use of its device: distance from the limit, energy, clocks, and the cost of images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from vivace.answers.answer import Table
from vivace.answers.formatting import joules, money, seconds, signed_seconds
from vivace.report.csv_rows import at
from vivace.report.device_limit import cost_per_1000
from vivace.report.rows import Row


@dataclass(frozen=True)
class UsageFigure:
    """A column: its heading, the unit of its numbers, and functions that compute and print them."""

    name: str
    title: str
    unit: str
    of: Callable[[Row], float | None]
    text: Callable[[float], str]


def _busy(row: Row) -> float | None:
    if row.gpu_busy_s is None or row.latency is None:
        return None
    return min(1.0, row.gpu_busy_s / row.latency.median.point)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


FIGURES = (
    UsageFigure("limit", "at the limit", "s", at("limit.limit_s"), seconds),
    UsageFigure("limit_share", "speed, of the limit's", "1", at("limit.share"), _percent),
    UsageFigure("lost_to_kernels", "lost to kernels", "s", at("limit.kernels_s"), signed_seconds),
    UsageFigure("launch_gaps", "to gaps", "s", at("limit.gaps_s"), signed_seconds),
    UsageFigure("outside_components", "outside", "s", at("limit.outside_s"), seconds),
    UsageFigure("gpu_busy", "GPU busy", "1", _busy, _percent),
    UsageFigure("energy", "energy an image", "J", at("gpu.energy_j"), joules),
    UsageFigure("power", "mean power", "W", at("gpu.power_w"), lambda watts: f"{watts:.0f} W"),
    UsageFigure("sm_clock", "SM clock", "MHz", at("gpu.sm_clock_mhz"), lambda mhz: f"{mhz:.0f} MHz"),
    UsageFigure("hours_per_1000", "hours for 1,000 images", "h",
                lambda row: None if row.latency is None else cost_per_1000(row.latency.median.point, 1.0),
                lambda hours: f"{hours:.3g}"),
    UsageFigure("cost_per_1000", "cost of 1,000", "price", at("cost_per_1000"), money),
)  # fmt: skip
SHORT = ("limit", "limit_share", "energy", "cost_per_1000")
"""Columns for the terminal, which has less room."""
_NOT_ALONE = ("hours_per_1000",)


def usage_table(measured: Sequence[tuple[str, Row]], names: Sequence[str] = ()) -> Table:
    """Return the table of measured rows, with their labels; without rows if nothing is known beyond their times."""
    used = [
        figure
        for figure in FIGURES
        if (not names or figure.name in names) and any(figure.of(row) is not None for _, row in measured)
    ]
    throttled = {label: row.gpu.throttled for label, row in measured if row.gpu and row.gpu.throttled}
    with_clocks = bool(throttled) and not names
    rows = []
    for label, row in measured:
        cells = ["–" if (value := figure.of(row)) is None else figure.text(value) for figure in used]
        cells += [", ".join(throttled.get(label, ())) or "nothing"] if with_clocks else []
        rows.append((label, *cells))
    headings = [figure.title for figure in used] + (["clocks held down by"] if with_clocks else [])
    is_empty = all(figure.name in _NOT_ALONE for figure in used)
    note = "\n".join(f"{rows_}: {reason}" for rows_, reason in no_limit(measured))
    return Table.of(("measured here", *headings), [] if is_empty else rows, note=note)


def no_limit(measured: Iterable[tuple[str, Row]]) -> Iterator[tuple[str, str]]:
    """Yield (rows, reason) of rows whose limit is not known though ceilings are."""
    labels_by_reason: dict[str, list[str]] = {}
    for label, row in measured:
        if row.limit is not None and row.limit.reason is not None:
            labels_by_reason.setdefault(row.limit.reason, []).append(label)
    for reason, labels in labels_by_reason.items():
        yield ", ".join(labels), f"no limit: {reason}"


def numbers(row: Row) -> Iterator[tuple[str, str, float]]:
    for figure in FIGURES:
        if (value := figure.of(row)) is not None and figure.name not in _NOT_ALONE:
            yield figure.name, figure.unit, value
