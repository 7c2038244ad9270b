"""Weigh tables: their nearness to the question, their advice, and the one to follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from vivace.evidence.recommendation.criteria import Goal
from vivace.evidence.recommendation.kin import Kin, kin_of
from vivace.evidence.recommendation.predicted_tables import is_bf16
from vivace.evidence.recommendation.ranking import NOISE, Selection, choose, rank
from vivace.evidence.recommendation.recommendation import LeftOut
from vivace.evidence.recommendation.row_filter import RowFilter
from vivace.evidence.recommendation.speed_limit import flop_of_call, on_chip
from vivace.evidence.tables import EvidenceRow, EvidenceTable
from vivace.foundation.hardware import Near, capability_of, known_gpu, near
from vivace.foundation.stats import Interval


@dataclass(frozen=True)
class RankedTable:
    """A table with its nearness to the question, and its advice.

    Attributes:
        order: of evidence, the best first.
        choice: None if no row is allowed.
        num_ranked: rows with the requested figure, allowed or not.
        is_small: the GPU is too small for the published model.
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
    def has_rivals(self) -> bool:
        """Whether more than the baseline is allowed."""
        return self.choice is not None and len(self.choice.ranking) > 1

    @property
    def is_transferred(self) -> bool:
        return self.table.model != self.kin.name

    @property
    def score(self) -> float:
        """The chosen row's score over the model as published, where the table has that."""
        if self.choice is None:
            return 0.0
        published = next(
            (ranked.score.point for ranked in self.choice.ranking if ranked.row.num_techniques == 0), 1.0
        )
        return self.choice.chosen.score.point / published

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
    if kin.is_gguf and table.kind != "own":
        return None
    if not is_own_model and not kin.is_family(kin_of(table.model, frozenset((table.model,)))):
        return None
    is_cpu = gpu is not None and gpu.lower() == "cpu"
    if not table.compared or (is_cpu and table.device != "cpu"):
        return None  # what a GPU gains says nothing about a CPU
    nearness = _near(table, gpu)
    if table.device == "cpu" and gpu is not None and not is_cpu:
        # A process's resident set says nothing about a GPU's memory.
        rows = tuple(row.model_copy(update={"peak_bytes": None}) for row in table.rows)
        table = table.model_copy(update={"rows": rows})
    scored, without = rank(table, table.rows, judge.criteria.goal)
    scores = {id(ranked.row): ranked.score.point for ranked in scored}
    reasons = {id(row): why for row, why in without}
    allowed, out = [], []
    keys = set()
    for row in table.rows:
        if (row.recipe, row.batch, row.label.partition(" #")[0]) in keys:
            continue  # a recipe that was compared with itself
        keys.add((row.recipe, row.batch, row.label))
        left_out = judge.left_out(row, table, nearness)
        if left_out is None and id(row) in reasons:
            left_out = LeftOut(recipe=row.recipe, label=row.label, kind="no figure", why=reasons[id(row)])
        if left_out is None:
            allowed.append(row)
        else:
            out.append(left_out.model_copy(update={"score": scores.get(id(row))}))
    out.sort(key=lambda candidate: -(candidate.score or 0))
    choice = choose(
        [ranked for ranked in scored if any(ranked.row is row for row in allowed)], judge.criteria.goal
    )
    return RankedTable(
        table,
        kin,
        _order(table, nearness, is_own_model, judge),
        nearness,
        choice,
        len(scored),
        tuple(out),
        judge.criteria.goal,
        judge.is_small,
    )


def _near(table: EvidenceTable, gpu: str | None) -> Near:
    if gpu is None:
        return Near.SAME
    if gpu.lower() == "cpu" or table.device == "cpu":
        return Near.SAME if gpu.lower() == table.device else Near.OTHER
    return near(gpu, table.gpu)


def _order(table: EvidenceTable, nearness: Near, is_own_model: bool, judge: RowFilter) -> tuple[int, ...]:
    """Return the place of a table among the evidence.

    The user's own records of the model come first, this GPU's before others'. Then committed and published ones: of the
    same GPU before those that are transferred from another one, and before times that were taken under a profiler. The
    family's records come last. Peak memory hardly depends on the GPU, so all GPUs' are looked at together for that.

    If the published model does not fit the GPU, predictions for it come after measurements on it, since other GPUs'
    gains are over a model that cannot run there. If it fits, predictions are only for models without a record.
    """
    kind = {"own": 0, "committed": 1, "community": 2, "published": 3, "predicted": 4}[table.kind]
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
    if (
        first is None
        or first.table.kind not in ("committed", "community", "published")
        or first.near is not Near.SAME
    ):
        return first
    nearer = [source for source in weighed if _is_faster_sister(source, first)]
    return max(nearer, key=lambda source: source.gain_over(first), default=first)


def _is_faster_sister(source: RankedTable, first: RankedTable) -> bool:
    """Whether a record of another GPU of the same compute capability has a recipe that is faster here by projection."""
    if source.table.kind != "committed" or source.is_transferred or source.near is not Near.GENERATION:
        return False
    if first.goal != "latency" or not source.is_comparison or source.choice is None or first.choice is None:
        return False
    if (
        capability_of(source.table.gpu) != capability_of(first.table.gpu)
        or source.gain_over(first) <= 1 + NOISE
    ):
        return False
    mine, theirs = (
        first.choice.chosen.row.latency,
        projected(source.choice.chosen.row, source, first.table.gpu),
    )
    return mine is not None and theirs is not None and theirs.point * (1 + NOISE) < mine.point


def projected(row: EvidenceRow, of: RankedTable, gpu: str) -> Interval | None:
    """Return the projected seconds of another GPU's row on a GPU; None if they cannot be projected."""
    here, there = known_gpu(gpu), known_gpu(of.table.gpu)
    if row.latency is None or here is None or there is None:
        return None
    published = of.kin.published
    flop = math.inf if published is None else flop_of_call(published)
    chip = here.chip.as_of_bf16 if is_bf16(published) and "fp16" not in row.recipe else here.chip
    return on_chip(row.latency.point, flop, there.chip, chip, row.recipe)


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
        elif _improves(best) and best.table.kind != "predicted" and _speaks_beside(best, first):
            assert best.choice is not None
            if best.choice.chosen.row.recipe not in {row.recipe for row in first.table.compared}:
                return best
    return first


def _speaks_beside(source: RankedTable, first: RankedTable) -> bool:
    """Whether evidence may be followed in place of a table without a recipe better than the published model.

    Of the same GPU, also if it is about another model of the family; of another GPU, if the first one is as well.
    """
    return source.near == first.near or (first.near is not Near.SAME and not source.is_transferred)


def _improves(source: RankedTable) -> bool:
    """Whether a table's advice is better than the published model, or that does not fit."""
    if source.choice is None or source.choice.chosen.row.num_techniques == 0:
        return False
    return source.is_small or source.goal == "stability" or source.score > 1


def _best_of(usable: Sequence[RankedTable]) -> RankedTable | None:
    """Return the table with the largest gain on the nearest GPU, among equally good evidence; None if there is none."""
    if not usable:
        return None
    gains = {id(source): (source.has_rivals, *_gain(source, usable)) for source in usable}
    best = max(usable, key=lambda source: (*gains[id(source)], source.table.at))
    has_rivals, is_known, gain = gains[id(best)]
    equals = [
        source
        for source in usable
        if gains[id(source)][:2] == (has_rivals, is_known) and gains[id(source)][2] * (1 + NOISE) >= gain
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
    """Return a row's peak in bytes or its seconds an image, whichever the goal is about."""
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
    return (
        table.kind,
        table.model,
        table.device,
        table.gpu,
        table.height,
        table.width,
        table.batch,
    )
