"""The answer of a search in one sentence that claims only what was proved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vivace.foundation.stats import Verdict
from vivace.report.rows import Row

if TYPE_CHECKING:
    from vivace.tuning.answer import Tuned


@dataclass(frozen=True)
class Headline:
    """The sentence, and whether the final proved it."""

    text: str
    is_proved: bool


def headline(tuned: Tuned) -> Headline:
    """Return the answer in one sentence."""
    where = f"{tuned.model} on {tuned.device_name}"
    row, baseline = tuned.row, tuned.rows[0] if tuned.rows else None
    if tuned.pick is None or row is None or baseline is None or row.latency is None:
        return Headline(f"{where}: no recipe was shown to be better than the baseline", False)
    if tuned.objective.measures_memory:
        return Headline(f"{where}: {_memory(row, baseline)}", True)
    if row.speedup is None:
        return Headline(f"{where}: the speed-up is not known", False)
    times = f"{row.speedup.point:.2f} times as fast"
    if len(row.record.rounds) == 1:
        return Headline(f"{where}: {times} in one round, not proved", False)
    if row.verdict is Verdict.SAME:
        return Headline(f"{where}: no faster than the baseline beyond 1 %", True)
    if row.verdict is not Verdict.FASTER and (row.is_disturbed or baseline.is_disturbed):
        return Headline(f"{where}: about {times}, measured on a busy machine", False)
    if row.verdict is not Verdict.FASTER:
        return Headline(f"{where}: {times}, too noisy to be certain", False)
    return Headline(f"{where}: {times}", True)


def _memory(row: Row, baseline: Row) -> str:
    if row.memory is None or baseline.memory is None:
        return "less memory"
    share = 1 - row.memory.peak_bytes / baseline.memory.peak_bytes
    return f"{100 * share:.0f} % less memory"
