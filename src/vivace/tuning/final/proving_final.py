"""The final that proves an answer: the baseline, the pick and its rivals side by side."""

from __future__ import annotations

from dataclasses import replace

from vivace.foundation.stats import Interval, Verdict
from vivace.report.rows import Row
from vivace.tuning.final.measuring import Bench
from vivace.tuning.search.results import Result


def final_of(bench: Bench, pick: Result | None) -> tuple[Row, ...]:
    """Return the rows of the last final with the pick, including stored ones of this search; without a pick, of the
    last final."""
    rows = bench.finals.rows(None if pick is None else pick.recipe)
    return tuple(without_unproved(row) for row in rows)


def without_unproved(row: Row) -> Row:
    """Return the row, without the speed-up's interval if there is a single round, whose calls share its luck."""
    if row.speedup is None or len(row.record.rounds) > 1:
        return row
    return replace(row, speedup=Interval(row.speedup.point, None, None), verdict=Verdict.UNCLEAR)
