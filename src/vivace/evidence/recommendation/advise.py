"""From records to a recommendation: `vivace.recommend`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vivace.answers.formatting import seconds, size
from vivace.architectures import CATALOGUE
from vivace.errors import RecipeError, Unpredictable, UsageError, VivaceError
from vivace.evidence.committed import committed_tables
from vivace.evidence.community import community_tables
from vivace.evidence.measured import DISTURBED, tables_of_store
from vivace.evidence.parsed import resolve
from vivace.evidence.recommendation.criteria import Criteria, Goal
from vivace.evidence.recommendation.kin import Kin, kin_of
from vivace.evidence.recommendation.others import (
    basis_of,
    fewer_steps,
    figures_of,
    limit_of,
    missing_evidence,
    other_sources,
    safe_choice,
)
from vivace.evidence.recommendation.predicted_tables import Card, fits_published, predicted_table, typical_gpu
from vivace.evidence.recommendation.ranking import Ranked, pooled
from vivace.evidence.recommendation.recommendation import LeftOut, Reason, RecipeFigures, Recommendation
from vivace.evidence.recommendation.row_filter import RowFilter
from vivace.evidence.recommendation.sentences import assessed, next_commands, quality_of, why_lost
from vivace.evidence.recommendation.speed_limit import chip_limit
from vivace.evidence.recommendation.weighing import RankedTable, followed, over_published, weigh
from vivace.evidence.studies.published_tables import published_tables
from vivace.evidence.tables import EvidenceRow, EvidenceTable
from vivace.foundation.hardware import Near, counted, known_gpu, named_gpu, near, present_gpu, this_gpu
from vivace.foundation.spec.arguments import parse_bytes
from vivace.foundation.spec.input_errors import InputErrors
from vivace.foundation.spec.limits import Limits
from vivace.foundation.spec.settings import DEFAULT_STORE
from vivace.foundation.spec.workload import Task
from vivace.foundation.stats import Interval
from vivace.models.find import SYNTHETIC
from vivace.models.tasks import own_task
from vivace.recipes.recipe import Recipe
from vivace.runtime.memory.fit import RESERVE_BYTES
from vivace.runtime.memory.predict import Prediction
from vivace.runtime.memory.remembered import footprints, predicted
from vivace.runtime.memory.weightless import Weightless, find_weightless
from vivace.techniques.steps import Steps

_POOLED = ("throughput", "cost")
_MOST_PREDICTED = 2
"""Most recipes whose memory is predicted, which takes seconds; after that only recipes that fit for sure count."""
_ROUNDING = 0.999


def recommend(
    model: str,
    *,
    gpu: str | None = None,
    max_memory: float | str | None = None,
    min_quality: Limits | None = None,
    goal: Goal = "latency",
    price_per_hour: float | None = None,
    same_picture: bool = False,
    task: Task | None = None,
    store: str | Path | Sequence[str | Path] | None = None,
) -> Recommendation:
    """Return the best recipe by the existing records: the store's, those that ship with vivace, published numbers.

    Recipes are compared within a source, against its baseline. The model's own records on this GPU come first; evidence
    of other models of the family, or of other GPUs, is marked. Nothing is measured, loaded or downloaded.

    Args:
        model: a name of the catalogue, `synthetic:NAME`, or whatever the store's records call it.
        gpu: e.g. "A100"; None for this machine's, or any if it has none.
        max_memory: a hard limit on peak memory: "12GB" (1e9 each), "12GiB", or a number of GB. The memory of the GPU is
            a limit anyway, with a reserve.
        min_quality: limits that a recipe's images must be proven to keep; None: those that fail the gate, and those
            that change the image without proof of their quality, are left out.
        goal: "latency", "memory", "throughput", "cost" (with `price_per_hour`) or "stability".
        price_per_hour: of the GPU, in any currency.
        same_picture: only recipes that keep the image.
        task: what the images start from; None for what the model is published for. Records of other tasks do not count.
        store: folder of records, or several, or () for none; None for .vivace if there is one.

    Raises:
        UsageError, UnknownModel, UnusableModel, StoreError: an argument is invalid.
    """
    if goal == "cost" and price_per_hour is None:
        raise UsageError("the goal cost needs the GPU's price; add --price-per-hour 2.5, in any currency")
    limit = None if max_memory is None else parse_bytes(max_memory)
    own = [table for folder in _folders(store) for table in tables_of_store(folder, min_quality)]
    num_gpus = 1
    if gpu is not None:
        num_gpus, gpu = counted(gpu)
        gpu = checked_gpu(gpu, {table.gpu for table in own}, limit)
    with InputErrors():
        criteria = Criteria(
            model=model,
            gpu=gpu,
            num_gpus=num_gpus,
            max_bytes=limit,
            limits=min_quality,
            goal=goal,
            price_per_hour=price_per_hour,
            same_picture=same_picture,
            task=task or _own_task(model),
        )
    return recommend_from(criteria, [*own, *committed_tables(), *community_tables(), *published_tables()])


def checked_gpu(name: str, recorded: Iterable[str], max_bytes: float | None = None) -> str:
    """Return the name of a GPU that vivace knows, of a GPU in the user's own records, or "cpu".

    Args:
        max_bytes: a limit on memory, which tells the size of a GPU that is sold with several.

    Raises:
        UsageError: it is none of these.
    """
    if name.strip().lower() == "cpu":
        return "cpu"
    if known_gpu(name) is None and any(near(name, other) is Near.SAME for other in recorded):
        return name.strip()
    return named_gpu(name).within(max_bytes).name


def _own_task(model: str) -> Task:
    """Return the task that a model of the catalogue is published for; unknown for other models, whose files are not
    read."""
    entry = CATALOGUE.get(model.strip().lower().removeprefix(SYNTHETIC))
    return "text" if entry is None else own_task(entry.pipeline)


def _folders(store: str | Path | Sequence[str | Path] | None) -> list[Path]:
    if store is None:
        return [Path(DEFAULT_STORE)] if Path(DEFAULT_STORE, "records.sqlite").is_file() else []
    return [Path(store)] if isinstance(store, str | Path) else list(dict.fromkeys(map(Path, store)))


def recommend_from(
    criteria: Criteria,
    tables: Iterable[EvidenceTable],
    card: Card | None = None,
    published: Prediction | None = None,
    *,
    with_predictions: bool = True,
) -> Recommendation:
    """Return the best recipe by the given tables alone; see `recommend`.

    Args:
        card: the GPU to fit; None for the requested one, or this machine's.
        published: the model's needs without a recipe; None for the catalogue's figures.
        with_predictions: also rank recipes without measurements, and count memory as `vivace plan` does.
    """
    candidates = list(tables)
    kin = kin_of(criteria.model, frozenset(table.model for table in candidates))
    candidates = [at_own_steps(kin.adopt(table), kin) for table in candidates]
    # Image-to-image runs a share of the steps, and encodes an image: its times say nothing about text-to-image.
    candidates = [table for table in candidates if table.task == criteria.task]
    gpu = criteria.gpu if criteria.gpu is not None else this_gpu()
    candidates = (
        pooled(candidates)
        if criteria.goal in _POOLED
        else [table for table in candidates if table.batch == 1]
    )
    card = card or _card(criteria)
    published = published or kin.published
    published = published if published is not None and published.task == criteria.task else None
    is_small = (
        card is not None
        and published is not None
        and not fits_published(published, _least(card.num_bytes, criteria.max_bytes))
    )
    is_predicted = with_predictions and criteria.goal in ("latency", "memory")
    if is_predicted and card is not None and published is not None:
        candidates.append(predicted_table(kin, card, candidates, published))
    judge = RowFilter(
        criteria,
        kin,
        gpu,
        None if card is None or card.is_typical else card,
        is_small,
        published,
        with_predictions,
    )
    answer = _answer(judge, candidates)
    while (problem := objection(answer, judge)) is not None:
        refused = {**judge.refused, problem.recipe: problem}
        judge = replace(judge, refused=refused, is_strict=len(refused) >= _MOST_PREDICTED)
        answer = _answer(judge, candidates)
    return answer


def _answer(judge: RowFilter, candidates: Iterable[EvidenceTable]) -> Recommendation:
    """Return the best allowed recipe of the tables."""
    criteria, kin, gpu = judge.criteria, judge.kin, judge.gpu
    weighed = [source for table in candidates if (source := weigh(table, kin, gpu, judge)) is not None]
    weighed.sort(key=lambda source: source.order)
    best = followed(weighed)
    limit = None if best is None else limit_of(best, judge)
    answer = Recommendation(
        criteria=criteria,
        model=kin.name,
        gpu=gpu,
        limit=limit or chip_limit(kin.architecture, gpu, kin.steps),
        card_bytes=None if judge.card is None else round(judge.card.num_bytes),
    )
    if best is None:
        left_out = [out for source in weighed if not source.is_transferred for out in source.left_out]
        missing = missing_evidence(weighed, kin, criteria, gpu, None)
        answer = answer.model_copy(update={"left_out": _each_once(left_out), "missing": missing})
        return answer.model_copy(update={"next": next_commands(answer)})
    return _answered(answer, best, weighed, kin, judge)


def _card(criteria: Criteria) -> Card | None:
    """Return the GPU to fit: the requested one, or this machine's, or a usual one with the requested memory."""
    if criteria.gpu is not None:
        gpu = known_gpu(criteria.gpu)
        return None if gpu is None else Card(gpu, gpu.memory_bytes)
    present = present_gpu()
    if present is not None:
        gpu = known_gpu(present.name)
        return None if gpu is None else Card(gpu, present.memory_bytes)
    if criteria.max_bytes is None:
        return None
    num_bytes = criteria.max_bytes + RESERVE_BYTES
    return Card(typical_gpu(criteria.max_bytes), num_bytes, is_typical=True)


def _least(card_bytes: float, max_bytes: float | None) -> float:
    """Return the memory limit of a recipe, with the reserve."""
    return card_bytes if max_bytes is None else min(card_bytes, max_bytes + RESERVE_BYTES)


def _answered(
    answer: Recommendation, best: RankedTable, weighed: Sequence[RankedTable], kin: Kin, judge: RowFilter
) -> Recommendation:
    """Return the answer of a table, with the notes of others."""
    choice = best.choice
    assert choice is not None

    def figures(ranked: Ranked) -> RecipeFigures:
        return figures_of(ranked, best, judge)

    ranking = {(f.recipe, f.batch, f.label): f for f in map(figures, choice.ranking)}
    is_timed = answer.criteria.goal in ("latency", "throughput", "cost")
    answer = answer.model_copy(
        update={
            "recipe": choice.chosen.row.recipe,
            "basis": basis_of(best, judge.gpu),
            "chosen": figures(choice.chosen),
            "baseline": figures(Ranked(best.table.rows[0], Interval(1.0, None, None))),
            "over_published": over_published(best, weighed),
            "runner_up": None if choice.runner_up is None else figures(choice.runner_up),
            "is_tie": any(choice.runner_up is ranked for ranked in choice.tied),
            "ties": tuple(figures(ranked).title for ranked in choice.tied),
            "ranking": tuple(ranking.values()),
            "safe": safe_choice(best, weighed, judge),
            "left_out": _each_once(best.left_out),
            "elsewhere": tuple(other_sources(best, weighed, judge)),
            "other_model": fewer_steps(best, weighed) if is_timed else None,
            "missing": missing_evidence(weighed, kin, judge.criteria, judge.gpu, best),
        }
    )
    answer = answer.model_copy(update={"quality": quality_of(answer), "why": why_lost(answer)})
    sure, doubts = assessed(answer)
    answer = answer.model_copy(update={"sure": sure, "doubts": doubts})
    mine = [
        source
        for source in weighed
        if source.table.kind == "own" and source.near is Near.SAME and not source.is_transferred
    ]
    tried = frozenset(row.recipe for source in mine for row in source.table.rows)
    is_disturbed = any(row.reason == DISTURBED for source in mine for row in source.table.rows)
    return answer.model_copy(update={"next": next_commands(answer, tried, is_disturbed=is_disturbed)})


def _each_once(left_out: Iterable[LeftOut]) -> tuple[LeftOut, ...]:
    return tuple({(candidate.recipe, candidate.kind): candidate for candidate in left_out}.values())


def at_own_steps(table: EvidenceTable, kin: Kin) -> EvidenceTable:
    """Return a record of vivace's at the model's own number of steps: each row's steps take proportionally longer.

    A row without the time of its steps in the record, or whose recipe sets their number, has no time and no
    gain there. Tables of other models, the user's own, and published ones stay as they are.
    """
    own = kin.steps
    if table.kind != "committed" or table.model != kin.name or own is None or table.steps in (None, own):
        return table
    assert table.steps is not None
    rows = [_scaled(row, own, table.steps) for row in table.rows]
    base = rows[0].latency
    if base is None:
        return table.model_copy(update={"steps": own, "rows": tuple(rows)})
    with_gains = [rows[0], *(_compared(row, base) for row in rows[1:])]
    return table.model_copy(update={"steps": own, "rows": tuple(with_gains)})


def _scaled(row: EvidenceRow, own_steps: int, steps: int) -> EvidenceRow:
    if row.latency is None:
        return row
    if row.steps_s is None or _sets_steps(row.recipe):
        why = f"timed with {steps} steps, whose share of the time is not known"
        if _sets_steps(row.recipe):
            why = f"compared with {steps} steps of the model"
        return row.model_copy(
            update={"outcome": "not comparable", "reason": why, "latency": None, "gain": None}
        )
    factor, timed_steps = own_steps / steps, row.timed_steps or steps
    more = row.steps_s * (factor - 1)
    point = row.latency.point + more
    stretch = point / row.latency.point
    low, high = row.latency.low, row.latency.high
    latency = Interval(
        point, None if low is None else low * stretch, None if high is None else high * stretch
    )
    update = {
        "latency": latency,
        "steps_s": row.steps_s * factor,
        "timed_steps": None if timed_steps == own_steps else timed_steps,
        "spread": None,
    }
    return row.model_copy(update=update)


def _compared(row: EvidenceRow, base: Interval) -> EvidenceRow:
    """Return a row with its gain over the baseline, from the scaled times; with an interval of the same width."""
    if row.latency is None or row.gain is None:
        return row
    point = base.point / row.latency.point
    stretch = point / row.gain.point
    low, high = row.gain.low, row.gain.high
    gain = Interval(point, None if low is None else low * stretch, None if high is None else high * stretch)
    return row.model_copy(update={"gain": gain})


def _sets_steps(recipe: str) -> bool:
    try:
        return any(
            isinstance(technique, Steps) or technique.facts.trained_steps for technique in resolve(recipe)
        )
    except RecipeError:
        return False


def objection(answer: Recommendation, judge: RowFilter) -> LeftOut | None:
    """Return the chosen recipe with what is wrong with the answer; None if nothing is."""
    chosen, basis = answer.chosen, answer.basis
    if chosen is None or basis is None:
        return None

    def out(kind: Reason, why: str) -> LeftOut:
        return LeftOut(recipe=chosen.recipe, label=chosen.label, kind=kind, why=why, score=chosen.score.point)

    try:
        recipe = resolve(chosen.recipe)
    except RecipeError as error:
        return out("hardware", f"this version of vivace cannot read it: {error.problem}")
    limit = answer.limit
    if limit is not None and chosen.latency is not None and chosen.batch == 1:
        least = limit.least_s(chosen.recipe)
        if chosen.latency.point < _ROUNDING * least:
            return out(
                "no figure", f"{seconds(chosen.latency.point)} is below the {seconds(least)} of {limit.gpu}"
            )
    if basis.kind != "own" and any(technique.facts.num_gpus > 1 for technique in recipe):
        return out("hardware", "it needs several GPUs")
    allowed = judge.most_bytes
    if (
        allowed is None
        or basis.kind == "own"
        or basis.device != "cuda"
        or judge.most_needed(chosen) <= allowed
    ):
        return None
    need = _predicted_bytes(chosen, judge)
    if need > allowed:
        return out("memory", f"`vivace plan` counts {size(need)} for it, and {size(allowed)} are there")
    return None


def _predicted_bytes(chosen: RecipeFigures, judge: RowFilter) -> float:
    """Return a recipe's memory as `vivace plan` counts it, which takes seconds; its record's where it cannot."""
    published = judge.published
    assert published is not None
    # Models of one architecture and size have one answer.
    alike = (published.components, published.height, published.width)
    name = next(
        name for name, each in footprints().items() if (each.components, each.height, each.width) == alike
    )
    try:
        model = find_weightless(name)
        return prediction_of(model, resolve(chosen.recipe), published, chosen.peak_bytes).needed_bytes
    except (VivaceError, OSError):
        return chosen.peak_bytes or 0


def prediction_of(
    model: Weightless, recipe: Recipe, published: Prediction, recorded_bytes: float | None
) -> Prediction:
    """Return the prediction of a recipe; an upper estimate where none can be made, as for CUDA graphs.

    The estimate is the recipe without the technique plus a step's activations, which a graph's pool keeps; or the
    recorded memory, if that is larger.

    Raises:
        Unpredictable: more than one technique of the recipe cannot be predicted.
    """
    how: dict[str, Any] = {
        key: getattr(published, key) for key in ("height", "width", "batch", "text", "task")
    }
    try:
        return predicted(model, recipe, **how)
    except Unpredictable as error:
        for technique in recipe:
            if not str(error).startswith(f"{technique.name}:"):
                continue
            rest = predicted(model, recipe.without(technique), **how)
            most = max(rest.peak_bytes, round(recorded_bytes or 0)) + rest.peak_bytes - rest.model_bytes
            return rest.model_copy(update={"recipe": recipe.text, "peak_bytes": most})
        raise
