"""Weigh tables: how near each is to what is asked, what it advises, and which one to follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from vivace.advice.allowed import Judge
from vivace.advice.answer import Basis, Figures, LeftOut
from vivace.advice.evidence import Seen, Table
from vivace.advice.families import Kin, kin_of
from vivace.advice.limit import ChipLimit, chip_limit, flop_of_call
from vivace.advice.projection import on_chip
from vivace.advice.ranking import NOISE, Choice, Ranked, choose, gain_of, rank
from vivace.advice.wanted import Goal
from vivace.hardware import Near, capability_of, known_gpu, near
from vivace.memory.footprints import footprints
from vivace.stats import Interval


@dataclass(frozen=True)
class Weighed:
    """A table with how near it is to what is asked, and what it advises.

    Attributes:
        order: of evidence, the best first.
        choice: None if no row is allowed.
        num_ranked: rows that have the figure that was asked for, allowed or not.
    """

    table: Table
    kin: Kin
    order: tuple[int, ...]
    near: Near
    choice: Choice | None
    num_ranked: int
    left_out: tuple[LeftOut, ...]
    goal: Goal

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
        published = next((one.score.point for one in self.choice.ranking if one.row.num_techniques == 0), 1.0)
        return self.choice.chosen.score.point / published

    def gain_over(self, other: Weighed) -> float:
        """Return how many times as good as another table's chosen row this one's is.

        Both over the baseline, if they have one recipe as theirs; else over the model as published.
        """
        if self.choice is None or other.choice is None:
            return 0.0
        if self.table.rows[0].recipe == other.table.rows[0].recipe:
            return self.choice.chosen.score.point / other.choice.chosen.score.point
        return self.score / other.score


def weigh(table: Table, kin: Kin, gpu: str | None, judge: Judge) -> Weighed | None:
    """Return a table with its advice; None if it is about a model of another kind, or nothing was timed."""
    is_own_model = table.model == kin.name
    if not is_own_model and not kin.is_family(kin_of(table.model, frozenset((table.model,)))):
        return None
    if not table.compared:
        return None
    nearness = _near(table, gpu)
    if table.device == "cpu" and gpu is not None and gpu.lower() != "cpu":
        # A process's resident set says nothing about a GPU's memory.
        rows = tuple(row.model_copy(update={"peak_bytes": None}) for row in table.rows)
        table = table.model_copy(update={"rows": rows})
    scored, without = rank(table, table.rows, judge.wanted.goal)
    scores = {id(one.row): one.score.point for one in scored}
    reasons = {id(row): why for row, why in without}
    allowed, out = [], []
    seen = set()
    for row in table.rows:
        if (row.recipe, row.batch, row.label.partition(" #")[0]) in seen:
            continue  # a recipe that was compared with itself
        seen.add((row.recipe, row.batch, row.label))
        found = judge.left_out(row, table, nearness)
        if found is None and id(row) in reasons:
            found = LeftOut(recipe=row.recipe, label=row.label, kind="no figure", why=reasons[id(row)])
        if found is None:
            allowed.append(row)
        else:
            out.append(found.model_copy(update={"score": scores.get(id(row))}))
    out.sort(key=lambda one: -(one.score or 0))
    choice = choose([one for one in scored if any(one.row is row for row in allowed)], judge.wanted.goal)
    return Weighed(
        table,
        kin,
        _order(table, nearness, is_own_model, judge),
        nearness,
        choice,
        len(scored),
        tuple(out),
        judge.wanted.goal,
    )


def _near(table: Table, gpu: str | None) -> Near:
    if gpu is None:
        return Near.SAME
    if gpu.lower() == "cpu" or table.device == "cpu":
        return Near.SAME if gpu.lower() == table.device else Near.OTHER
    return near(gpu, table.gpu)


def _order(table: Table, nearness: Near, is_own_model: bool, judge: Judge) -> tuple[int, ...]:
    """Return the place of a table among the evidence.

    The user's own records of the model come first, this GPU's before others'. Then committed and published ones: of the
    same GPU before those that are transferred from another one, and before times that were taken under a profiler. The
    family's records come last. Peak memory hardly depends on the GPU, so all GPUs' are looked at together for that.

    What is predicted for the GPU comes after what was measured on it, if the model as published does not fit it: other
    GPUs' gains are over what cannot run there. If it fits, a prediction is for models that no record is of.
    """
    kind = {"own": 0, "committed": 1, "published": 2, "predicted": 3}[table.kind]
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
    if judge.wanted.goal == "memory":
        return (1, 0, 0)
    return (1, place, kind)


def followed(weighed: Sequence[Weighed]) -> Weighed | None:
    """Return the table to follow: of the best evidence that allows a recipe, the one with the largest gain.

    Tables with other baselines than the model as published are compared by their times, or peaks, where another table
    has the published model with the same workload, or another number of its steps; where none has it, they come last.

    A record that ships with vivace, and has nothing better than the published model, says nothing of recipes that it
    lacks. A source about the same GPU whose best recipe it lacks is then followed: of the model, or of its family.

    vivace's record of another GPU of the same generation is followed where its recipe is faster than what was measured
    on this one: two GPUs of one compute capability run the same programs.
    """
    first = _first(weighed)
    if first is None or first.table.kind not in ("committed", "published") or first.near is not Near.SAME:
        return first
    nearer = [one for one in weighed if _is_faster_sister(one, first)]
    return max(nearer, key=lambda one: one.gain_over(first), default=first)


def _is_faster_sister(one: Weighed, first: Weighed) -> bool:
    """Whether a record of another GPU of one compute capability has a recipe that is faster here, as projected."""
    if one.table.kind != "committed" or one.is_transferred or one.near is not Near.GENERATION:
        return False
    if first.goal != "latency" or not one.is_comparison or one.choice is None or first.choice is None:
        return False
    if capability_of(one.table.gpu) != capability_of(first.table.gpu) or one.gain_over(first) <= 1 + NOISE:
        return False
    mine, theirs = first.choice.chosen.row.latency, projected(one.choice.chosen.row, one, first.table.gpu)
    return mine is not None and theirs is not None and theirs.point * (1 + NOISE) < mine.point


def projected(row: Seen, of: Weighed, gpu: str) -> Interval | None:
    """Return the seconds of a row of another GPU's table on a GPU; None if that cannot be told."""
    here, there = known_gpu(gpu), known_gpu(of.table.gpu)
    if row.latency is None or here is None or there is None:
        return None
    published = footprints().get(of.kin.name)
    flop = math.inf if published is None else flop_of_call(published)
    return on_chip(row.latency.point, flop, there.chip, here.chip, row.recipe)


def _first(weighed: Sequence[Weighed]) -> Weighed | None:
    """Return the best evidence that allows a recipe, see `followed`."""
    first = None
    for _, group in groupby(weighed, key=lambda one: one.order):
        found = _best_of([one for one in group if one.is_comparison])
        if found is None:
            continue
        if first is None:
            first = found
            if found.table.kind == "own" or _improves(found):
                return found
            if found.table.kind == "published" and found.near is Near.SAME:
                return found
        elif _improves(found) and found.table.kind != "predicted" and _speaks_beside(found, first):
            assert found.choice is not None
            if found.choice.chosen.row.recipe not in {row.recipe for row in first.table.compared}:
                return found
    return first


def _speaks_beside(one: Weighed, first: Weighed) -> bool:
    """Whether evidence may be followed in the place of one that has nothing better than the published model.

    Of the same GPU, also if it is about another model of the family; of another GPU, if the first one is as well.
    """
    return one.near == first.near or (first.near is not Near.SAME and not one.is_transferred)


def _improves(one: Weighed) -> bool:
    """Whether a table advises more than the published model."""
    return one.choice is not None and one.choice.chosen.row.num_techniques > 0


def _best_of(usable: Sequence[Weighed]) -> Weighed | None:
    """Return the one of equally good evidence with the largest gain, of the nearest GPU; None if there is none."""
    if not usable:
        return None
    gains = {id(one): (one.has_rivals, *_gain(one, usable)) for one in usable}
    best = max(usable, key=lambda one: (*gains[id(one)], one.table.at))
    has_rivals, is_known, gain = gains[id(best)]
    equals = [
        one
        for one in usable
        if gains[id(one)][:2] == (has_rivals, is_known) and gains[id(one)][2] * (1 + NOISE) >= gain
    ]
    nearest = min(one.near for one in equals)  # they differ only where GPUs are looked at together
    return best if best.near == nearest else next(one for one in equals if one.near == nearest)


def _gain(one: Weighed, others: Sequence[Weighed]) -> tuple[bool, float]:
    """Return whether a table's gain over the model as published is known, and the gain over that or its baseline."""
    goal = one.goal
    if goal == "stability" or one.choice is None or _has_published(one):
        return True, one.score
    mine, steps = _absolute(one.choice.chosen.row, goal), one.table.steps
    published = [
        other.table
        for other in others
        if other.table.rows[0].num_techniques == 0 and _workload(other.table) == _workload(one.table)
    ]
    for table in sorted(published, key=lambda table: table.steps != steps):
        base = _absolute(table.rows[0], goal)
        if table.steps != steps:
            base = _with_steps(table, steps) if goal != "memory" else None
        if mine and base:
            return True, base / mine
    return False, one.score


def over_published(one: Weighed, others: Sequence[Weighed]) -> float | None:
    """Return the chosen row's speed-up over the published model by another record; None if its own table says it.

    None too if no record does. That may have another number of steps: of its time, that of the steps is scaled.
    """
    if one.goal != "latency" or _has_published(one):
        return None
    is_known, gain = _gain(one, others)
    return gain if is_known else None


def _has_published(one: Weighed) -> bool:
    """Whether a table compares its choice with the published model itself, or has no choice."""
    if one.choice is None or one.table.rows[0].num_techniques == 0:
        return True
    return any(each.row.num_techniques == 0 for each in one.choice.ranking)


def _absolute(row: Seen, goal: Goal) -> float | None:
    """Return a row's peak in bytes or its seconds an image, whichever the goal looks at."""
    if goal == "memory":
        return row.peak_bytes
    return None if row.latency is None else row.latency.point


def _with_steps(table: Table, steps: int | None) -> float | None:
    """Return the seconds an image that the published model takes with another number of steps; None if unknown."""
    base = table.rows[0]
    if base.latency is None or base.steps_s is None or not table.steps or not steps:
        return None
    return base.latency.point + base.steps_s * (steps / table.steps - 1)


def _workload(table: Table) -> tuple[object, ...]:
    """Return what two tables share whose times can be compared, but for the number of steps."""
    return (
        table.kind,
        table.model,
        table.device,
        table.gpu,
        table.height,
        table.width,
        table.batch,
    )


def figures_of(one: Ranked, of: Weighed, judge: Judge) -> Figures:
    """Return a row's figures, its time on the GPU that was asked about."""
    row, table, wanted = one.row, of.table, judge.wanted
    latency = time_here(row, of, judge)
    is_projected = of.near is not Near.SAME and row.predicted_from is None and row.latency is not None
    cost = None
    if wanted.price_per_hour is not None and latency is not None and of.near is Near.SAME:
        cost = wanted.price_per_hour / 3600 * latency.point * 1000
    return Figures(
        recipe=row.recipe,
        label=row.label,
        batch=row.batch,
        num_techniques=row.num_techniques,
        same_picture=judge.keeps(row, table),
        score=one.score,
        gain=gain_of(row, table),
        latency=latency,
        predicted_from=table.gpu if is_projected else row.predicted_from,
        measured_s=row.latency.point if is_projected and row.latency is not None else row.measured_s,
        peak_bytes=row.peak_bytes,
        first_call_s=row.first_call_s,
        spread=row.spread,
        num_rounds=row.num_rounds,
        is_counted=row.is_counted,
        timed_steps=row.timed_steps,
        cost_per_1000=cost,
        judged=judge.judged(row, table),
        note=row.note,
    )


def time_here(row: Seen, of: Weighed, judge: Judge) -> Interval | None:
    """Return the seconds of a row on the GPU that was asked about, at the number of steps that the answer is for.

    None where no such time can be told: another model's, another number of steps, a GPU without data sheet, or a time
    that the chip cannot reach, which then is of something else than it says.
    """
    table = of.table
    latency = row.latency
    if latency is None or of.is_transferred:
        return None
    if table.kind == "published" and table.steps is not None and table.steps != (of.kin.steps or table.steps):
        return None
    is_elsewhere = of.near is not Near.SAME and judge.gpu is not None and table.device != "cpu"
    if is_elsewhere:
        assert judge.gpu is not None
        latency = projected(row, of, judge.gpu)
    limit = limit_of(of, judge)
    if latency is None or limit is None or row.batch > 1 or limit.allows(row.recipe, latency.point):
        return latency
    if not is_elsewhere and row.predicted_from is None:
        return None
    least = limit.least_s(row.recipe)
    return Interval(least, least, max(least, latency.high or least))


def limit_of(of: Weighed, judge: Judge) -> ChipLimit | None:
    """Return the limit of the GPU that was asked about, or of the table's, for a table's number of steps."""
    entry_steps = of.kin.steps if of.table.kind != "own" else of.table.steps
    limit = chip_limit(of.kin.name, judge.gpu or of.table.gpu, entry_steps)
    sizes = (of.table.height, of.table.width)
    published = footprints().get(of.kin.name)
    is_own_size = published is not None and sizes in ((None, None), (published.height, published.width))
    return limit if is_own_size and of.table.task == (published.task if published else "text") else None


def basis_of(one: Weighed, gpu: str | None) -> Basis:
    table = one.table
    name = "any" if gpu is None else {Near.SAME: "same", Near.GENERATION: "generation"}.get(one.near, "other")
    return Basis(
        kind=table.kind,
        place=table.place,
        model=table.model,
        gpu=table.gpu,
        near=name,
        random_weights=table.random_weights,
        baseline=table.baseline,
        height=table.height,
        width=table.width,
        steps=table.steps,
        batch=table.batch,
        device=table.device,
        at=table.at,
        note=table.note,
    )
