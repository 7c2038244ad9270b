"""Rank the rows of tables by a goal, weigh the tables by their nearness to the question, and follow one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from vivace.evidence.choice import simplest_of_best
from vivace.evidence.recommendation.kin import Kin, kin_of
from vivace.evidence.recommendation.predicted import projected
from vivace.evidence.recommendation.recommendation import Goal, LeftOut
from vivace.evidence.recommendation.row_filter import RowFilter
from vivace.evidence.tables import EvidenceRow, EvidenceTable
from vivace.foundation.hardware import Near, capability_of, near
from vivace.foundation.stats import ONE_ROUND_MARGIN, Interval

NOISE = 0.03
"""Relative difference below which figures without an interval count as equal."""
MEMORY_NOISE = 0.01
"""Relative difference below which peaks of an allocator count as equal."""
MIN_CALLS = 6
"""Smallest number of timed calls from which their spread is known."""
TIMED: tuple[Goal, ...] = ("latency", "throughput", "cost")
_KINDS = {"own": 0, "committed": 1, "community": 2, "published": 3, "predicted": 4}


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
        tied: the others that are tied with the best.
    """

    chosen: Ranked
    tied: tuple[Ranked, ...]
    ranking: tuple[Ranked, ...]

    @property
    def runner_up(self) -> Ranked | None:
        return next((ranked for ranked in self.ranking if ranked is not self.chosen), None)


def choose(ranked: Sequence[Ranked], goal: Goal) -> Selection | None:
    ordered = sorted(ranked, key=lambda ranked: -ranked.score.point)
    if not ordered:
        return None

    def simplicity(ranked: Ranked) -> tuple[float, ...]:
        row = ranked.row
        seconds = math.inf if row.latency is None else row.latency.point
        return row.num_techniques, not row.same_picture, -ranked.score.point if goal in TIMED else seconds

    chosen, equals = simplest_of_best(ordered[0], ordered, is_tie, simplicity)
    return Selection(chosen, tuple(source for source in equals if source is not chosen), tuple(ordered))


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


def rank(table: EvidenceTable, goal: Goal) -> tuple[list[Ranked], list[tuple[EvidenceRow, str]]]:
    """Return the rows with scores, and those without a figure for the goal, with the reason."""
    ranked, without = [], []
    spreads = [row.spread for row in table.rows if row.spread is not None]
    by_p99 = bool(spreads) and all(spread.p99_s is not None for spread in spreads)
    is_exact = goal == "memory" and table.kind != "published" and table.device != "cpu"
    for row in table.rows:
        score: Interval | None
        if goal == "memory":
            base = table.rows[0].peak_bytes or max((r.peak_bytes or 0 for r in table.rows), default=0)
            score = None if row.peak_bytes is None else Interval(base / row.peak_bytes, None, None)
            why = "its peak memory is not known"
        elif goal == "stability":
            spread = None if row.reason else _spread_ratio(row, by_p99)
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


def _spread_ratio(row: EvidenceRow, by_p99: bool) -> float | None:
    """Return p99 over the median of a row's calls, or the longest over the shortest; None for too few calls."""
    spread = row.spread
    if spread is None:
        return None
    if by_p99:
        return None if spread.p99_s is None else spread.p99_s / spread.p50_s
    if spread.max_s is None or (spread.num_calls or 0) < MIN_CALLS:
        return None
    return spread.max_s / spread.min_s


def pooled(tables: Sequence[EvidenceTable]) -> list[EvidenceTable]:
    """Return tables of the same model, device and size as one, whatever their batch size.

    Speed-ups are those over the baseline at the smallest batch, from the times an image: on one machine these can be
    compared, if not as precisely as within a comparison.
    """

    def but_batch(table: EvidenceTable) -> tuple[str, ...]:
        names = ("kind", "place", "model", "random_weights", "gpu", "height", "width", "steps", "baseline")
        return tuple(str(getattr(table, name)) for name in names)

    tables_left = []
    for _, group in groupby(sorted(tables, key=but_batch), key=but_batch):
        by_batch = sorted(group, key=lambda table: table.batch)
        first = by_batch[0]
        if len({table.batch for table in by_batch}) == 1 or first.rows[0].latency is None:
            tables_left += by_batch
            continue
        base = first.rows[0].latency.point
        rows = [first.rows[0]]
        for row in (row for table in by_batch for row in table.rows if row is not first.rows[0]):
            latency, gain = row.latency, None
            if latency is not None and (row.gain is not None or row.recipe == first.baseline):
                has_ends = latency.low is not None and latency.high is not None
                low, high = (base / (latency.high or 1), base / (latency.low or 1))
                gain = Interval(base / latency.point, *((low, high) if has_ends else (None, None)))
            rows.append(row.model_copy(update={"gain": gain}))
        tables_left.append(first.model_copy(update={"rows": tuple(rows)}))
    return tables_left


@dataclass(frozen=True)
class RankedTable:
    """A table with its nearness to the question, and its advice.

    Attributes:
        order: of evidence, the best first.
        num_ranked: rows with the requested figure, allowed or not.
    """

    table: EvidenceTable
    kin: Kin
    order: tuple[int, ...]
    near: Near
    choice: Selection | None
    num_ranked: int
    left_out: tuple[LeftOut, ...]
    goal: Goal
    is_small: bool = False

    @property
    def is_comparison(self) -> bool:
        """Whether it compares recipes, and allows one."""
        return self.choice is not None and self.num_ranked > 1

    @property
    def is_transferred(self) -> bool:
        return self.table.model != self.kin.name

    @property
    def score(self) -> float:
        """The chosen row's score over the model as published, where the table has that."""
        if self.choice is None:
            return 0.0
        of_published = [each.score.point for each in self.choice.ranking if each.row.num_techniques == 0]
        return self.choice.chosen.score.point / (of_published[0] if of_published else 1.0)

    def gain_over(self, other: RankedTable) -> float:
        """Return the ratio of the chosen row's score to that of another table's.

        Both are over the baseline if the tables share it, else over the model as published.
        """
        if self.choice is None or other.choice is None:
            return 0.0
        if self.table.rows[0].recipe == other.table.rows[0].recipe:
            return self.choice.chosen.score.point / other.choice.chosen.score.point
        return self.score / other.score


def weigh(table: EvidenceTable, kin: Kin, gpu: str | None, judge: RowFilter) -> RankedTable | None:
    """Return a table with its advice; None if it is about a model of another kind, or nothing was timed."""
    is_own_model = table.model == kin.name
    if kin.is_gguf and table.kind not in ("own", "predicted"):
        return None
    if not is_own_model and not kin.is_family(kin_of(table.model, frozenset((table.model,)))):
        return None
    is_cpu = gpu is not None and gpu.lower() == "cpu"
    if not table.compared or (is_cpu and table.device != "cpu"):
        return None  # what a GPU gains says nothing about a CPU
    nearness = Near.SAME
    if gpu is not None and (is_cpu or table.device == "cpu"):
        nearness = Near.SAME if gpu.lower() == table.device else Near.OTHER
    elif gpu is not None:
        nearness = near(gpu, table.gpu)
    if table.device == "cpu" and gpu is not None and not is_cpu:
        # A process's resident set says nothing about a GPU's memory.
        rows = tuple(row.model_copy(update={"peak_bytes": None}) for row in table.rows)
        table = table.model_copy(update={"rows": rows})
    goal = judge.criteria.goal
    scored, without = rank(table, goal)
    scores = {id(ranked.row): ranked.score.point for ranked in scored}
    reasons = {id(row): why for row, why in without}
    allowed, out = set(), []
    keys = set()
    for row in table.rows:
        if (row.recipe, row.batch, row.label.partition(" #")[0]) in keys:
            continue  # a recipe that was compared with itself
        keys.add((row.recipe, row.batch, row.label))
        left_out = judge.left_out(row, table, nearness)
        if left_out is None and id(row) in reasons:
            left_out = LeftOut(recipe=row.recipe, label=row.label, kind="no figure", why=reasons[id(row)])
        if left_out is None:
            allowed.add(id(row))
        else:
            out.append(left_out.model_copy(update={"score": scores.get(id(row))}))
    out.sort(key=lambda candidate: -(candidate.score or 0))
    choice = choose([ranked for ranked in scored if id(ranked.row) in allowed], goal)
    order = _order(table, nearness, is_own_model, judge)
    return RankedTable(
        table, kin, order, nearness, choice, len(scored), tuple(out), goal, is_small=judge.is_small
    )


def _order(table: EvidenceTable, nearness: Near, is_own_model: bool, judge: RowFilter) -> tuple[int, ...]:
    """Return the place of a table among the evidence.

    The user's own records of the model come first, this GPU's before others'. Then committed and published ones: of the
    same GPU before those that are transferred from another one, and before times that were taken under a profiler. The
    family's records come last. Peak memory hardly depends on the GPU, so all GPUs' are looked at together for that.

    If the published model does not fit the GPU, predictions for it come after measurements on it, since other GPUs'
    gains are over a model that cannot run there. If it fits, predictions are only for models without a record.
    """
    kind = _KINDS[table.kind]
    if table.kind == "predicted":
        if not judge.is_small:
            return (3, nearness, kind)
        # All records are of other GPUs than an unnamed one.
        return (1, nearness, kind if judge.gpu is not None else 0)
    place = Near.OTHER + 1 if table.profiled else nearness
    if not is_own_model:
        return (2, place, kind)
    if kind == 0:
        return (0, nearness, 0)
    if judge.criteria.goal == "memory":
        return (1, 0, 0)
    return (1, place, kind)


def followed(weighed: Sequence[RankedTable]) -> RankedTable | None:
    """Return the table to follow: the one with the largest gain among the best evidence that allows a recipe.

    Tables with other baselines than the model as published are compared by their times, or peaks, where another table
    has the published model with the same workload, or another number of its steps; where none has it, they come last.

    A record that ships with vivace and has nothing better than the published model says nothing about recipes that it
    lacks. A source about the same GPU whose best recipe it lacks is then followed: of the model, or of its family.

    vivace's record of another GPU of the same generation is followed if its recipe is faster than those measured on
    this one: two GPUs of one compute capability run the same programs.
    """
    first = _first(weighed)
    is_of_others = first is not None and first.table.kind in ("committed", "community", "published")
    if first is None or not is_of_others or first.near is not Near.SAME:
        return first
    nearer = [source for source in weighed if _is_faster_sister(source, first)]
    return max(nearer, key=lambda source: source.gain_over(first), default=first)


def _is_faster_sister(source: RankedTable, first: RankedTable) -> bool:
    """Whether a record of another GPU of the same compute capability has a recipe that is faster here by projection."""
    if source.table.kind != "committed" or source.is_transferred or source.near is not Near.GENERATION:
        return False
    if first.goal != "latency" or not source.is_comparison or source.choice is None or first.choice is None:
        return False
    is_sister = capability_of(source.table.gpu) == capability_of(first.table.gpu)
    if not is_sister or source.gain_over(first) <= 1 + NOISE:
        return False
    mine = first.choice.chosen.row.latency
    theirs = projected(source.choice.chosen.row, source.table.gpu, source.kin, first.table.gpu)
    return mine is not None and theirs is not None and theirs.point * (1 + NOISE) < mine.point


def _first(weighed: Sequence[RankedTable]) -> RankedTable | None:
    """Return the best evidence that allows a recipe, see `followed`."""
    first = None
    for _, group in groupby(weighed, key=lambda source: source.order):
        best = _best_of([source for source in group if source.is_comparison])
        if best is None:
            continue
        if first is None:
            first = best
            if best.table.kind == "own" or _improves(best):
                return best
            if best.table.kind == "published" and best.near is Near.SAME:
                return best
            continue
        # Of the same GPU, also if it is about another model of the family; of another GPU, if the first one is as well.
        speaks = best.near == first.near or (first.near is not Near.SAME and not best.is_transferred)
        if _improves(best) and best.table.kind != "predicted" and speaks:
            assert best.choice is not None
            if best.choice.chosen.row.recipe not in {row.recipe for row in first.table.compared}:
                return best
    return first


def _improves(source: RankedTable) -> bool:
    """Whether a table's advice is better than the published model, or that does not fit."""
    if source.choice is None or source.choice.chosen.row.num_techniques == 0:
        return False
    return source.is_small or source.goal == "stability" or source.score > 1


def _best_of(usable: Sequence[RankedTable]) -> RankedTable | None:
    """Return the table with the largest gain on the nearest GPU, among equally good evidence; None if there is none."""
    if not usable:
        return None

    def has_rivals(source: RankedTable) -> bool:
        return source.choice is not None and len(source.choice.ranking) > 1

    gains = {id(source): (has_rivals(source), *_gain(source, usable)) for source in usable}
    best = max(usable, key=lambda source: (*gains[id(source)], source.table.at))
    *kind, gain = gains[id(best)]
    equals = [
        source
        for source in usable
        if [*gains[id(source)][:2]] == kind and gains[id(source)][2] * (1 + NOISE) >= gain
    ]
    nearest = min(source.near for source in equals)  # they differ only where GPUs are looked at together
    return best if best.near == nearest else next(source for source in equals if source.near == nearest)


def _gain(source: RankedTable, others: Sequence[RankedTable]) -> tuple[bool, float]:
    """Return a table's gain over the published model, or else over its baseline, and whether it is the former."""
    goal = source.goal
    if goal == "stability" or source.choice is None or _has_published(source):
        return True, source.score
    mine, steps = _absolute(source.choice.chosen.row, goal), source.table.steps
    published = [
        other.table
        for other in others
        if other.table.rows[0].num_techniques == 0 and _workload(other.table) == _workload(source.table)
    ]
    for table in sorted(published, key=lambda table: table.steps != steps):
        base = _absolute(table.rows[0], goal)
        if table.steps != steps:
            base = _with_steps(table, steps) if goal != "memory" else None
        if mine and base:
            return True, base / mine
    return False, source.score


def over_published(source: RankedTable, others: Sequence[RankedTable]) -> float | None:
    """Return the chosen row's speed-up over the published model by another record; None if its own table has it.

    None too if no record does. That may have another number of steps: of its time, that of the steps is scaled.
    """
    if source.goal != "latency" or _has_published(source):
        return None
    is_known, gain = _gain(source, others)
    return gain if is_known else None


def _has_published(source: RankedTable) -> bool:
    """Whether a table compares its choice with the published model itself, or has no choice."""
    if source.choice is None or source.table.rows[0].num_techniques == 0:
        return True
    return any(each.row.num_techniques == 0 for each in source.choice.ranking)


def _absolute(row: EvidenceRow, goal: Goal) -> float | None:
    if goal == "memory":
        return row.peak_bytes
    return None if row.latency is None else row.latency.point


def _with_steps(table: EvidenceTable, steps: int | None) -> float | None:
    """Return the published model's seconds an image with another number of steps; None if unknown."""
    base = table.rows[0]
    if base.latency is None or base.steps_s is None or not table.steps or not steps:
        return None
    return base.latency.point + base.steps_s * (steps / table.steps - 1)


def _workload(table: EvidenceTable) -> tuple[object, ...]:
    """Return the conditions that two tables with comparable times share, except the number of steps."""
    names = ("kind", "model", "device", "gpu", "height", "width", "batch")
    return tuple(getattr(table, name) for name in names)
