"""Rank the rows of a table by a goal, and find those that are tied with the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from vivace.evidence.choice import simplest_of_best
from vivace.evidence.recommendation.criteria import Goal
from vivace.evidence.tables import EvidenceRow, EvidenceTable
from vivace.foundation.stats import ONE_ROUND_MARGIN, Interval

NOISE = 0.03
"""Relative difference below which figures without an interval count as equal."""
MEMORY_NOISE = 0.01
"""Relative difference below which peaks of an allocator count as equal."""
MIN_CALLS = 6
"""Smallest number of timed calls from which their spread is known."""


@dataclass(frozen=True)
class Ranked:
    """A row with its score by the goal, relative to the table's baseline; more is better.

    Attributes:
        noise: relative difference below which scores without an interval count as equal.
    """

    row: EvidenceRow
    score: Interval
    noise: float = NOISE


@dataclass(frozen=True)
class Selection:
    """The best row, and the rows that lost against it.

    Attributes:
        chosen: the simplest of those that are tied with the best.
        best: the one with the highest score.
        tied: the others that are tied with the best.
        ranking: all, the highest score first.
    """

    chosen: Ranked
    best: Ranked
    tied: tuple[Ranked, ...]
    ranking: tuple[Ranked, ...]

    @property
    def runner_up(self) -> Ranked | None:
        """The best of the others."""
        return next((ranked for ranked in self.ranking if ranked is not self.chosen), None)


def choose(ranked: Sequence[Ranked], goal: Goal) -> Selection | None:
    """Return the choice among rows; None if there are none."""
    ordered = sorted(ranked, key=lambda ranked: -ranked.score.point)
    if not ordered:
        return None
    best = ordered[0]
    chosen, equals = simplest_of_best(
        best,
        ordered,
        is_tie,
        lambda ranked: (
            *_simplicity(ranked.row),
            -ranked.score.point if goal in _TIMED else _slow(ranked),
        ),
    )
    return Selection(chosen, best, tuple(source for source in equals if source is not chosen), tuple(ordered))


_TIMED = ("latency", "throughput", "cost")


def _simplicity(row: EvidenceRow) -> tuple[int, bool]:
    return row.num_techniques, not row.same_picture


def _slow(ranked: Ranked) -> float:
    return math.inf if ranked.row.latency is None else ranked.row.latency.point


def is_tie(ranked: Ranked, other: Ranked) -> bool:
    """Whether two scores cannot be told apart.

    Their intervals overlap; without an interval they differ by no more than the noise, and after a single process by no
    more than drift can explain.
    """
    a, b = ranked.score, other.score
    apart = abs(math.log(a.point / b.point))
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return apart <= math.log1p(max(ranked.noise, other.noise))
    rounds = [ranked.row.num_rounds for ranked in (ranked, other)]
    if any(number is not None and number < 2 for number in rounds) and apart < math.log1p(ONE_ROUND_MARGIN):
        return True
    return a.low <= b.high and b.low <= a.high


def rank(
    table: EvidenceTable, rows: Sequence[EvidenceRow], goal: Goal
) -> tuple[list[Ranked], list[tuple[EvidenceRow, str]]]:
    """Return the rows with scores, and those without a figure for the goal, with the reason."""
    ranked, without = [], []
    reference = table.rows[0]
    spreads = _spreads(table) if goal == "stability" else {}
    is_exact = goal == "memory" and table.kind != "published" and table.device != "cpu"
    for row in rows:
        score: Interval | None
        if goal == "memory":
            base = reference.peak_bytes or max((r.peak_bytes or 0 for r in table.rows), default=0)
            score = None if row.peak_bytes is None else Interval(base / row.peak_bytes, None, None)
            why = "its peak memory is not known"
        elif goal == "stability":
            spread = None if row.reason else spreads.get(id(row))
            score = None if spread is None else Interval(1 / spread, None, None)
            why = row.reason or f"fewer than {MIN_CALLS} timed calls say nothing about their spread"
        else:
            score, why = gain_of(row, table), row.reason or "it was not timed beside the baseline"
        if score is None:
            without.append((row, why))
        else:
            ranked.append(Ranked(row, score, MEMORY_NOISE if is_exact else NOISE))
    return ranked, without


def gain_of(row: EvidenceRow, table: EvidenceTable) -> Interval | None:
    """Return a row's speed-up over the table's baseline, which is 1 for the baseline itself."""
    if row is table.rows[0]:
        has_intervals = any(r.gain is not None and r.gain.low is not None for r in table.rows)
        return Interval(1.0, 1.0, 1.0) if has_intervals else Interval(1.0, None, None)
    return row.gain


def spread_ratio(row: EvidenceRow, *, by_p99: bool) -> float | None:
    """Return p99 over the median of a row's calls, or the longest over the shortest; None for too few calls."""
    spread = row.spread
    if spread is None:
        return None
    if by_p99:
        return None if spread.p99_s is None else spread.p99_s / spread.p50_s
    if spread.max_s is None or (spread.num_calls or 0) < MIN_CALLS:
        return None
    return spread.max_s / spread.min_s


def is_by_p99(table: EvidenceTable) -> bool:
    """Whether the spreads of a table are compared by p99: if every row with a spread has that."""
    spreads = [row.spread for row in table.rows if row.spread is not None]
    return bool(spreads) and all(source.p99_s is not None for source in spreads)


def _spreads(table: EvidenceTable) -> dict[int, float]:
    by_p99 = is_by_p99(table)
    ratios = {id(row): spread_ratio(row, by_p99=by_p99) for row in table.rows}
    return {key: ratio for key, ratio in ratios.items() if ratio is not None}


def pooled(tables: Sequence[EvidenceTable]) -> list[EvidenceTable]:
    """Return tables of the same model, device and size as one, whatever their batch size.

    Speed-ups are those over the baseline at the smallest batch, from the times an image: on one machine these can be
    compared, if not as precisely as within a comparison.
    """
    tables_left = []
    for _, group in groupby(sorted(tables, key=_but_batch), key=_but_batch):
        by_batch = sorted(group, key=lambda table: table.batch)
        first = by_batch[0]
        if len({table.batch for table in by_batch}) == 1 or first.rows[0].latency is None:
            tables_left += by_batch
            continue
        base = first.rows[0].latency.point
        rows = [first.rows[0]]
        for row in (row for table in by_batch for row in table.rows if row is not first.rows[0]):
            is_comparable = row.latency is not None and (row.gain is not None or row.recipe == first.baseline)
            gain = _over(base, row.latency) if is_comparable and row.latency else None
            rows.append(row.model_copy(update={"gain": gain}))
        tables_left.append(first.model_copy(update={"rows": tuple(rows)}))
    return tables_left


def _but_batch(table: EvidenceTable) -> tuple[str, ...]:
    parts = (table.kind, table.place, table.model, table.random_weights, table.gpu, table.height, table.width)
    return tuple(map(str, (*parts, table.steps, table.baseline)))


def _over(base: float, latency: Interval) -> Interval:
    if latency.low is None or latency.high is None:
        return Interval(base / latency.point, None, None)
    return Interval(base / latency.point, base / latency.high, base / latency.low)
