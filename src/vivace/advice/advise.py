"""From records to a recommendation: `vivace.recommend`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from vivace.advice.allowed import Judge
from vivace.advice.answer import Basis, Elsewhere, Figures, LeftOut, OtherModel, Recommendation
from vivace.advice.committed import committed_tables
from vivace.advice.evidence import Table
from vivace.advice.families import Kin, kin_of
from vivace.advice.gpus import Near, near, this_gpu
from vivace.advice.measured import tables_of_store
from vivace.advice.published import published_tables
from vivace.advice.ranking import NOISE, Choice, Ranked, choose, gain_of, pooled, rank
from vivace.advice.wanted import GOALS, Goal, Wanted, parse_size
from vivace.advice.words import assessed, next_commands, quality_of, why_lost
from vivace.benchmark.store import DEFAULT_STORE
from vivace.errors import UsageError
from vivace.spec.limits import Limits
from vivace.spec.words import Checked
from vivace.stats import Gate, Interval

_POOLED = ("throughput", "cost")
_MOST_ELSEWHERE = 4


def recommend(
    model: str,
    *,
    gpu: str | None = None,
    max_memory: float | str | None = None,
    min_quality: Limits | None = None,
    goal: Goal = "latency",
    price_per_hour: float | None = None,
    same_picture: bool = False,
    store: str | Path | Sequence[str | Path] | None = None,
) -> Recommendation:
    """Return the best recipe by the records at hand: the store's, those that ship with vivace, published numbers.

    Recipes are compared within a source, against its baseline. The model's own records on this GPU come first; what
    other models of the family or other GPUs say is marked. Nothing is measured, loaded or downloaded.

    Args:
        model: a name of the catalogue, `synthetic:NAME`, or whatever the store's records call it.
        gpu: e.g. "A100"; None for this machine's, or any if it has none.
        max_memory: a hard limit on peak memory: bytes, or "12GB" (1e9 each), or "12GiB".
        min_quality: limits that a recipe's images must be proven to keep; None: those that fail the gate, and those
            that change the image without proof of their quality, are left out.
        goal: "latency", "memory", "throughput", "cost" (with `price_per_hour`) or "stability".
        price_per_hour: of the GPU, in any currency.
        same_picture: only recipes that keep the image.
        store: folder of records, or several; None for .vivace if there is one.

    Raises:
        UsageError, UnknownModel, UnusableModel, StoreError: something that was given is not what it should be.
    """
    if goal not in GOALS:
        raise UsageError(f"no goal '{str(goal)[:60]}' (goals: {', '.join(GOALS)})")
    if goal == "cost" and price_per_hour is None:
        raise UsageError("the goal cost needs the GPU's price; add --price-per-hour 2.5, in any currency")
    with Checked():
        wanted = Wanted(
            model=model,
            gpu=gpu,
            max_bytes=parse_size(max_memory) if isinstance(max_memory, str) else max_memory,
            limits=min_quality,
            goal=goal,
            price_per_hour=price_per_hour,
            same_picture=same_picture,
        )
    own = [table for folder in _folders(store) for table in tables_of_store(folder, min_quality)]
    return recommend_from(wanted, [*own, *committed_tables(), *published_tables()])


def _folders(store: str | Path | Sequence[str | Path] | None) -> list[Path]:
    if store is None:
        return [Path(DEFAULT_STORE)] if Path(DEFAULT_STORE, "records.sqlite").is_file() else []
    return [Path(store)] if isinstance(store, str | Path) else list(dict.fromkeys(map(Path, store)))


@dataclass(frozen=True)
class _Weighed:
    """A table with how near it is to what is asked, and what it advises.

    Attributes:
        order: of evidence, the best first.
        choice: None if no row is allowed.
    """

    table: Table
    kin: Kin
    order: tuple[int, ...]
    near: Near
    choice: Choice | None
    left_out: tuple[LeftOut, ...]

    @property
    def is_transferred(self) -> bool:
        return self.table.model != self.kin.name

    @property
    def score(self) -> float:
        """The chosen row's score over the model as published, where the table has that."""
        if self.choice is None:
            return 0.0
        published = next((one.score.point for one in self.choice.ranking if one.row.num_techniques == 0), 1.0)
        return self.choice.chosen.score.point / min(1.0, published)


def recommend_from(wanted: Wanted, tables: Iterable[Table]) -> Recommendation:
    """Return the best recipe by the given tables alone; see `recommend`."""
    found = list(tables)
    kin = kin_of(wanted.model, frozenset(table.model for table in found))
    gpu = wanted.gpu if wanted.gpu is not None else this_gpu()
    if wanted.goal in _POOLED:
        found = pooled(found)
    elif wanted.goal == "latency":
        found = [table for table in found if table.batch == 1]
    judge = Judge(wanted, kin, gpu)
    weighed = [one for table in found if (one := _weigh(table, kin, gpu, judge)) is not None]
    weighed.sort(key=lambda one: one.order)
    answer = Recommendation(wanted=wanted, model=kin.name, gpu=gpu)
    best = _best(weighed)
    if best is None or best.choice is None:
        left_out = tuple(out for one in weighed if not one.is_transferred for out in one.left_out)
        answer = answer.model_copy(
            update={"left_out": _each_once(left_out), "missing": _missing(weighed, kin, gpu, None)}
        )
        return answer.model_copy(update={"next": next_commands(answer, ())})
    return _answered(answer, best, weighed, kin, judge)


def _weigh(table: Table, kin: Kin, gpu: str | None, judge: Judge) -> _Weighed | None:
    """Return a table with its advice; None if it is about a model of another kind, or compares nothing."""
    is_own_model = table.model == kin.name
    if not is_own_model and not kin.is_family(kin_of(table.model, frozenset((table.model,)))):
        return None
    if len(table.timed) < 2:
        return None
    nearness = _near(table, gpu)
    allowed, out = [], []
    for row in table.rows:
        why = judge.left_out(row, table, nearness)
        if why is None:
            allowed.append(row)
        else:
            out.append(why)
    ranked, without = rank(table, allowed, judge.wanted.goal)
    out += [LeftOut(recipe=row.title, kind="not measured", why=why) for row, why in without]
    order = _order(table, nearness, is_own_model)
    return _Weighed(table, kin, order, nearness, choose(ranked, judge.wanted.goal), tuple(out))


def _near(table: Table, gpu: str | None) -> Near:
    if gpu is None:
        return Near.SAME
    if gpu.lower() == "cpu" or table.device == "cpu":
        return Near.SAME if gpu.lower() == table.device else Near.OTHER
    return near(gpu, table.gpu)


def _order(table: Table, nearness: Near, is_own_model: bool) -> tuple[int, ...]:
    """Return the place of a table among the evidence.

    The user's own records of the model come first, this GPU's before others'. Then committed and published ones: of the
    same GPU before those that are transferred from another one. The family's records come last.
    """
    kind = {"own": 0, "committed": 1, "published": 2}[table.kind]
    if not is_own_model:
        return (2, nearness, kind)
    return (0, nearness, 0) if kind == 0 else (1, nearness, kind)


def _best(weighed: Sequence[_Weighed]) -> _Weighed | None:
    """Return the table to follow: of the best evidence that allows a recipe, the one with the largest gain."""
    for _, group in groupby(weighed, key=lambda one: one.order):
        usable = [one for one in group if one.choice is not None]
        if usable:
            return max(usable, key=lambda one: (one.score, one.table.at))
    return None


def _answered(
    answer: Recommendation, best: _Weighed, weighed: Sequence[_Weighed], kin: Kin, judge: Judge
) -> Recommendation:
    choice, table = best.choice, best.table
    assert choice is not None
    wanted = answer.wanted

    def figures(one: Ranked, of: _Weighed = best) -> Figures:
        return _figures(one, of, judge)

    ranking = tuple({(f.recipe, f.batch, f.label): f for f in map(figures, choice.ranking)}.values())
    chosen = figures(choice.chosen)
    runner_up = None if choice.runner_up is None else figures(choice.runner_up)
    is_tie = choice.runner_up is not None and any(choice.runner_up is one for one in choice.tied)
    baseline = _figures(Ranked(table.rows[0], _one()), best, judge)
    elsewhere = tuple(
        Elsewhere(basis=_basis(one, judge.gpu), best=figures(one.choice.chosen, one))
        for one in _others(weighed, best)
        if one.choice is not None
    )
    answer = answer.model_copy(
        update={
            "recipe": chosen.recipe,
            "basis": _basis(best, judge.gpu),
            "chosen": chosen,
            "baseline": baseline,
            "runner_up": runner_up,
            "is_tie": is_tie,
            "ties": tuple(figures(one).title for one in choice.tied),
            "ranking": ranking,
            "safe": _safe(chosen, ranking),
            "left_out": _each_once(best.left_out),
            "elsewhere": elsewhere,
            "other_model": _other_model(best, weighed)
            if wanted.goal in ("latency", "throughput", "cost")
            else None,
            "missing": _missing(weighed, kin, judge.gpu, best),
        }
    )
    answer = answer.model_copy(update={"quality": quality_of(answer), "why": why_lost(answer)})
    sure, doubts = assessed(answer)
    answer = answer.model_copy(update={"sure": sure, "doubts": doubts})
    own = {
        row.recipe
        for one in weighed
        if one.table.kind == "own" and one.near is Near.SAME
        for row in one.table.rows
    }
    return answer.model_copy(update={"next": next_commands(answer, tuple(own))})


def _one() -> Interval:
    return Interval(1.0, None, None)


def _figures(one: Ranked, of: _Weighed, judge: Judge) -> Figures:
    row, table, wanted = one.row, of.table, judge.wanted
    cost = None
    if wanted.price_per_hour is not None and row.latency is not None and of.near is Near.SAME:
        cost = wanted.price_per_hour / 3600 * row.latency.point * 1000
    return Figures(
        recipe=row.recipe,
        label=row.label,
        batch=row.batch,
        num_techniques=row.num_techniques,
        same_picture=row.same_picture,
        score=one.score,
        gain=gain_of(row, table),
        latency=row.latency,
        peak_bytes=row.peak_bytes,
        first_call_s=row.first_call_s,
        spread=row.spread,
        num_rounds=row.num_rounds,
        timed_steps=row.timed_steps,
        cost_per_1000=cost,
        judged=judge.judged(row, table),
        note=row.note,
    )


def _basis(one: _Weighed, gpu: str | None) -> Basis:
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
        at=table.at,
    )


def _safe(chosen: Figures, ranking: Sequence[Figures]) -> Figures | None:
    """Return the best that keeps the image, if the chosen one changes it and nothing judged that."""

    proven = chosen.judged is not None and chosen.judged.gate is Gate.PASSED
    if chosen.same_picture or proven:
        return None
    return next((one for one in ranking if one.same_picture), None)


def _others(weighed: Sequence[_Weighed], best: _Weighed) -> list[_Weighed]:
    """Return the other tables with advice of their own, the best evidence first; one for each source and GPU."""
    found: dict[tuple[str, str, str], _Weighed] = {}
    for one in weighed:
        key = (one.table.place, one.table.model, one.table.gpu)
        mine = (best.table.place, best.table.model, best.table.gpu)
        if one is best or key == mine or one.choice is None or one.choice.chosen.row is one.table.rows[0]:
            continue
        if key not in found or one.score > found[key].score:
            found[key] = one
    return list(found.values())[:_MOST_ELSEWHERE]


def _other_model(best: _Weighed, weighed: Sequence[_Weighed]) -> OtherModel | None:
    """Return the fastest other model of the family, compared with this one in the same source and on the same GPU."""
    mine: dict[tuple[str, str], float] = {}
    for one in weighed:
        if one.choice is None or one.table.model != best.table.model:
            continue
        key, latency = (one.table.place, one.table.gpu), one.choice.chosen.row.latency
        if latency is not None:
            mine[key] = min(latency.point, mine.get(key, latency.point))
    found = []
    for one in weighed:
        row = None if one.choice is None else one.choice.chosen.row
        beside = mine.get((one.table.place, one.table.gpu))
        if one.table.model == best.table.model or row is None or row.latency is None or beside is None:
            continue
        if row.latency.point * (1 + NOISE) < beside:
            found.append((beside / row.latency.point, beside, one.table, row))
    if not found:
        return None
    times, beside, table, row = max(found, key=lambda one: one[0])
    assert row.latency is not None
    return OtherModel(
        model=table.model,
        recipe=row.recipe,
        latency_s=row.latency.point,
        instead_of_s=beside,
        ratio=times,
        steps=table.steps,
        place=table.place,
        gpu=table.gpu,
    )


def _missing(
    weighed: Sequence[_Weighed], kin: Kin, gpu: str | None, best: _Weighed | None
) -> tuple[str, ...]:
    """Say which evidence there is not, from the model's own on this GPU downwards."""
    own = [one for one in weighed if not one.is_transferred]
    said = []
    if not own:
        family = list(dict.fromkeys(one.table.model for one in weighed))
        told = f"; of its family: {', '.join(family)}" if family else ", nor of its family"
        said.append(f"no record compares recipes on {kin.name}{told}")
    if gpu is None:
        said.append(
            "no GPU was named, and this machine has none: the answer is for the GPU it was measured on"
        )
    elif own and not any(one.near is Near.SAME for one in own):
        names = list(dict.fromkeys(one.table.gpu for one in own if one.near is Near.GENERATION))
        of_generation = f"; of its generation: {', '.join(names)}" if names else ", nor on its generation"
        said.append(f"no record of {kin.name} on {gpu}{of_generation}")
    if not any(one.table.kind == "own" and not one.is_transferred for one in weighed):
        said.append("you have no records of it")
    if best is not None and any(one.order < best.order and one.choice is None for one in weighed):
        said.append("nearer records exist, but none of their recipes is allowed by what was asked")
    return tuple(said)


def _each_once(found: Iterable[LeftOut]) -> tuple[LeftOut, ...]:
    return tuple({(one.recipe, one.kind): one for one in found}.values())
