"""From records to a recommendation: `vivace.recommend`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vivace.answers.formatting import seconds, size
from vivace.architectures import CATALOGUE
from vivace.errors import RecipeError, Unpredictable, UsageError, VivaceError
from vivace.evidence.committed import committed_tables, community_tables
from vivace.evidence.measured import DISTURBED, tables_of_store
from vivace.evidence.recommendation.answer import assess, next_commands, quality_of, why_lost
from vivace.evidence.recommendation.kin import Kin, kin_of
from vivace.evidence.recommendation.predicted import (
    Card,
    ChipLimit,
    chip_limit,
    fits_published,
    predicted_table,
    projected,
    typical_gpu,
)
from vivace.evidence.recommendation.recommendation import (
    Basis,
    Criteria,
    Elsewhere,
    Goal,
    LeftOut,
    OtherModel,
    Reason,
    RecipeFigures,
    Recommendation,
)
from vivace.evidence.recommendation.row_filter import RowFilter
from vivace.evidence.recommendation.weighing import (
    NOISE,
    TIMED,
    Ranked,
    RankedTable,
    followed,
    gain_of,
    over_published,
    pooled,
    weigh,
)
from vivace.evidence.studies.published_tables import published_tables
from vivace.evidence.tables import EvidenceRow, EvidenceTable
from vivace.foundation.hardware import Near, counted, known_gpu, named_gpu, near, present_gpu, this_gpu
from vivace.foundation.spec.arguments import parse_bytes
from vivace.foundation.spec.input_errors import InputErrors
from vivace.foundation.spec.limits import Limits
from vivace.foundation.spec.settings import DEFAULT_STORE
from vivace.foundation.spec.workload import Task
from vivace.foundation.stats import Gate, Interval
from vivace.models.find import SYNTHETIC
from vivace.models.tasks import own_task
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve_cached
from vivace.runtime.memory.fit import RESERVE_BYTES
from vivace.runtime.memory.predict import Prediction
from vivace.runtime.memory.remembered import footprints, predicted
from vivace.runtime.memory.weightless import Weightless, find_weightless
from vivace.techniques.steps import Steps

_MOST_PREDICTED = 2
"""Most recipes whose memory is predicted, which takes seconds; after that only recipes that fit for sure count."""
_MOST_ELSEWHERE = 3
_MOST_NEARER = 2
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


def recommend_for(name: str, published: Prediction, card: Card) -> Recommendation:
    """Return the recommendation for a model whose needs were predicted, by the records that ship with vivace.

    Of models at another size than their own, only records of that size count, and of several images at once none.
    """
    criteria = Criteria(
        model=name,
        gpu=card.gpu.name,
        max_bytes=card.num_bytes - RESERVE_BYTES if card.is_typical else None,
        task=published.task,
    )
    own, sides = kin_of(name).published, (published.height, published.width)
    is_own_size = own is not None and sides == (own.height, own.width)
    tables = [
        table
        for table in (*committed_tables(), *community_tables(), *published_tables())
        if published.batch == 1 and (is_own_size or (table.height, table.width) in ((None, None), sides))
    ]
    return recommend_from(criteria, tables, card, published)


def checked_gpu(name: str, recorded: Iterable[str], max_bytes: float | None = None) -> str:
    """Return the name of a GPU that vivace knows, of a GPU in the user's own records, or "cpu"."""
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
    if criteria.goal in ("throughput", "cost"):
        candidates = pooled(candidates)
    else:
        candidates = [table for table in candidates if table.batch == 1]
    card = card or _card(criteria)
    published = published or kin.published
    published = published if published is not None and published.task == criteria.task else None
    is_small = False
    if card is not None and published is not None:
        most = min(card.num_bytes, (criteria.max_bytes or card.num_bytes) + RESERVE_BYTES)
        is_small = not fits_published(published, most)
        if with_predictions and criteria.goal in ("latency", "memory"):
            candidates.append(predicted_table(kin, card, candidates, published))
    limited = None if card is None or card.is_typical else card
    judge = RowFilter(criteria, kin, gpu, limited, is_small, published, with_predictions)
    answer = _answer(judge, candidates)
    while (problem := _objection(answer, judge)) is not None:
        refused = {**judge.refused, problem.recipe: problem}
        judge = replace(judge, refused=refused, is_strict=len(refused) >= _MOST_PREDICTED)
        answer = _answer(judge, candidates)
    return answer


def _card(criteria: Criteria) -> Card | None:
    present = None if criteria.gpu is not None else present_gpu()
    name = criteria.gpu if present is None else present.name
    if name is not None:
        gpu = known_gpu(name)
        return (
            None if gpu is None else Card(gpu, gpu.memory_bytes if present is None else present.memory_bytes)
        )
    if criteria.max_bytes is None:
        return None
    return Card(typical_gpu(criteria.max_bytes), criteria.max_bytes + RESERVE_BYTES, is_typical=True)


def _answer(judge: RowFilter, candidates: Iterable[EvidenceTable]) -> Recommendation:
    criteria, kin, gpu = judge.criteria, judge.kin, judge.gpu
    weighed = [source for table in candidates if (source := weigh(table, kin, gpu, judge)) is not None]
    weighed.sort(key=lambda source: source.order)
    best = followed(weighed)
    limit = None if best is None else _limit_of(best, judge)
    mine = [
        source.table
        for source in weighed
        if source.table.kind == "own" and source.near is Near.SAME and not source.is_transferred
    ]
    answer = Recommendation(
        criteria=criteria,
        model=kin.name,
        alike=kin.alike,
        gpu=gpu,
        limit=limit or chip_limit(kin.architecture, gpu, kin.steps),
        card_bytes=None if judge.card is None else round(judge.card.num_bytes),
        published_bytes=None if judge.published is None else judge.published.needed_bytes,
        missing=_missing_evidence(weighed, judge, best),
        disturbed=() if criteria.goal == "memory" else _disturbed(mine),
    )
    if best is None or best.choice is None:
        left_out = [out for source in weighed if not source.is_transferred for out in source.left_out]
        answer = answer.model_copy(update={"left_out": _each_once(left_out)})
        return answer.model_copy(update={"next": next_commands(answer)})
    choice = best.choice

    def figures(ranked: Ranked) -> RecipeFigures:
        return _figures_of(ranked, best, judge)

    ranking = {(f.recipe, f.batch, f.label): f for f in map(figures, choice.ranking)}
    answer = answer.model_copy(
        update={
            "recipe": choice.chosen.row.recipe,
            "basis": _basis_of(best, gpu),
            "chosen": figures(choice.chosen),
            "baseline": figures(Ranked(best.table.rows[0], Interval(1.0, None, None))),
            "over_published": over_published(best, weighed),
            "runner_up": None if choice.runner_up is None else figures(choice.runner_up),
            "is_tie": any(choice.runner_up is ranked for ranked in choice.tied),
            "ties": tuple(figures(ranked).title for ranked in choice.tied),
            "ranking": tuple(ranking.values()),
            "safe": _safe_choice(best, weighed, judge),
            "left_out": _each_once(best.left_out),
            "elsewhere": tuple(_other_sources(best, weighed, judge)),
            "other_model": _fewer_steps(best, weighed) if criteria.goal in TIMED else None,
        }
    )
    sure, doubts = assess(answer)
    answer = answer.model_copy(
        update={"quality": quality_of(answer), "why": why_lost(answer), "sure": sure, "doubts": doubts}
    )
    tried = frozenset(row.recipe for table in mine for row in table.rows)
    return answer.model_copy(update={"next": next_commands(answer, tried)})


def _disturbed(tables: Sequence[EvidenceTable]) -> tuple[str, ...]:
    """Return the recipes without a time that was not disturbed, the shortest time first, and before them a baseline."""
    known = {row.recipe for table in tables for row in table.rows if row.gain is not None}
    known |= {table.baseline for table in tables}
    times = {
        row.recipe: row.latency.point
        for table in tables
        for row in table.rows
        if row.latency is not None and row.reason == DISTURBED and row.recipe not in known
    }
    return (tables[0].baseline, *sorted(times, key=times.__getitem__)) if times else ()


def _each_once(left_out: Iterable[LeftOut]) -> tuple[LeftOut, ...]:
    return tuple({(candidate.recipe, candidate.kind): candidate for candidate in left_out}.values())


def _safe_choice(best: RankedTable, weighed: Sequence[RankedTable], judge: RowFilter) -> Elsewhere | None:
    """Return the best recipe that keeps the image, if the chosen one changes it without proof of its quality."""
    assert best.choice is not None
    chosen = _figures_of(best.choice.chosen, best, judge)
    if chosen.same_picture or (chosen.judged is not None and chosen.judged.gate is Gate.PASSED):
        return None
    safe = [
        (ranked.score.point, source, ranked)
        for source in weighed
        if source.order == best.order and source.choice is not None and source.is_comparison
        for ranked in source.choice.ranking
        if judge.keeps(ranked.row, source.table)
    ]
    if not safe:
        return None
    _, source, ranked = max(safe, key=lambda each: each[0])
    return Elsewhere(basis=_basis_of(source, judge.gpu), best=_figures_of(ranked, source, judge))


def _other_sources(
    best: RankedTable, weighed: Sequence[RankedTable], judge: RowFilter
) -> Iterator[Elsewhere]:
    """Yield the advice of other tables, the best evidence first, once per source, model and GPU.

    The recipe with the largest recorded gain on a GPU of the same generation is among them if it gains more than the
    chosen one.
    """

    def key_of(source: RankedTable) -> tuple[str, str, str]:
        return source.table.place, source.table.model, source.table.gpu

    best_by_place: dict[tuple[str, str, str], RankedTable] = {}
    for source in weighed:
        key = key_of(source)
        if key == key_of(best) or source.table.kind == "predicted" or not source.is_comparison:
            continue
        assert source.choice is not None
        chosen = source.choice.chosen.row
        gains = source.score > 1 or source.is_small or source.goal == "stability"
        if chosen is source.table.rows[0] or chosen.num_techniques == 0 or not gains:
            continue
        if key not in best_by_place or source.score > best_by_place[key].score:
            best_by_place[key] = source
    direct = [source for source in best_by_place.values() if not source.is_transferred]
    transferred = [source for source in best_by_place.values() if source.is_transferred]
    listed = direct[:_MOST_ELSEWHERE]
    faster = [
        source
        for source in direct
        if source.near is Near.GENERATION
        and source.table.kind != "published"
        and source.gain_over(best) > 1 + NOISE
    ]
    most = max(faster, key=lambda source: source.gain_over(best), default=None)
    if most is not None and most not in listed:
        listed = [*listed[:-1], most]
    for source in [*listed, *transferred[: max(1, _MOST_ELSEWHERE - len(direct))]]:
        assert source.choice is not None
        figures = _figures_of(source.choice.chosen, source, judge)
        if source.table.gpu != best.table.gpu:
            figures = figures.model_copy(update={"cost_per_1000": None})  # the price is of one GPU
        yield Elsewhere(basis=_basis_of(source, judge.gpu), best=figures, gains_more=source is most)


def _fewer_steps(best: RankedTable, weighed: Sequence[RankedTable]) -> OtherModel | None:
    """Return the fastest model of the family with at most half the steps, of the same source and on the same GPU."""
    times: dict[tuple[str, str], tuple[RankedTable, EvidenceRow, Interval]] = {}
    for source in weighed:
        if source.choice is None or source.table.kind == "predicted" or source.table.gpu != best.table.gpu:
            continue
        row = source.choice.chosen.row
        if row.latency is not None:
            times[source.table.place, source.table.model] = source, row, row.latency
    models = []
    for (place, model), (source, row, latency) in times.items():
        beside = times.get((place, best.table.model))
        mine, theirs = best.kin.steps, kin_of(model, frozenset((model,))).steps
        if beside is None or mine is None or theirs is None or 2 * theirs > mine:
            continue
        instead_of = beside[2]
        if latency.point * (1 + NOISE) < instead_of.point:
            other = OtherModel(
                model=model,
                recipe=row.recipe,
                latency_s=latency.point,
                instead_of_s=instead_of.point,
                ratio=instead_of.point / latency.point,
                steps=source.table.steps or theirs,
                place=place,
                gpu=source.table.gpu,
            )
            models.append(other)
    return max(models, key=lambda other: other.ratio, default=None)


def _missing_evidence(
    weighed: Sequence[RankedTable], judge: RowFilter, best: RankedTable | None
) -> tuple[str, ...]:
    kin, gpu, task, num_gpus = judge.kin, judge.gpu, judge.criteria.task, judge.criteria.num_gpus
    weighed = [source for source in weighed if source.table.kind != "predicted"]
    own = [source for source in weighed if not source.is_transferred and len(source.table.compared) > 1]
    sentences = []
    if not own:
        family = dict.fromkeys(source.table.model for source in weighed if source.is_transferred)
        of_family = (
            f"; of its family: {', '.join(family)}" if family else ", nor on another model of its family"
        )
        what = kin.name if task == "text" else f"the task '{task}' of {kin.name}"
        sentences.append(f"no record compares recipes on {what}{of_family}")
    if gpu is None:
        sentences.append(
            "no GPU was named, and this machine has none: the answer is for the GPU of its records"
        )
    elif own and not any(source.near is Near.SAME for source in own):
        names = dict.fromkeys(source.table.gpu for source in own if source.near is Near.GENERATION)
        of_generation = f"; of its generation: {', '.join(names)}" if names else ", nor on its generation"
        sentences.append(f"no record of {kin.name} on {gpu}{of_generation}")
    if num_gpus > 1:
        sentences.append(
            f"{num_gpus} GPUs were named, and this is for one: `parallel` spreads an image over several, and a process "
            "on each draws more an hour (docs/several-gpus.md)"
        )
    if not any(source.table.kind == "own" and not source.is_transferred for source in weighed):
        sentences.append("you have no records of it")
    nearer = [
        source
        for source in weighed
        if best is not None and source.order < best.order and not source.is_comparison
    ]
    for source in nearer[:_MOST_NEARER]:
        why = f" ({source.left_out[0].title}: {source.left_out[0].why})" if source.left_out else ""
        sentences.append(f"{source.table.place} is nearer, but compares nothing that is allowed{why}")
    return tuple(sentences)


def _figures_of(ranked: Ranked, of: RankedTable, judge: RowFilter) -> RecipeFigures:
    row, table, price = ranked.row, of.table, judge.criteria.price_per_hour
    latency = _time_here(row, of, judge)
    # Seconds of another model, with steps and a size of its own, are none of this one's.
    is_elsewhere = of.near is not Near.SAME and not of.is_transferred
    measured = row.latency if is_elsewhere and row.predicted_from is None else None
    cost = None
    if price is not None and latency is not None and of.near is Near.SAME:
        cost = price / 3600 * latency.point * 1000
    same = (
        "recipe", "label", "batch", "num_techniques", "peak_bytes", "first_call_s", "spread", "num_rounds",
        "is_counted", "timed_steps", "note",
    )  # fmt: skip
    return RecipeFigures(
        **{name: getattr(row, name) for name in same},
        same_picture=judge.keeps(row, table),
        score=ranked.score,
        gain=gain_of(row, table),
        latency=latency,
        predicted_from=row.predicted_from if measured is None else table.gpu,
        measured_s=row.measured_s if measured is None else measured.point,
        cost_per_1000=cost,
        judged=judge.judgement_of(row, table),
    )


def _time_here(row: EvidenceRow, of: RankedTable, judge: RowFilter) -> Interval | None:
    """Return the seconds of a row on the requested GPU, at the answer's number of steps.

    None where no such time is known: another model's, another number of steps, a GPU without data sheet, or a time that
    the chip cannot reach, which must be of something else.
    """
    table = of.table
    latency = row.latency
    if latency is None or of.is_transferred:
        return None
    if table.kind == "published" and table.steps is not None and table.steps != (of.kin.steps or table.steps):
        return None
    is_elsewhere = of.near is not Near.SAME and judge.gpu is not None and table.device != "cpu"
    if is_elsewhere and judge.gpu is not None:
        latency = projected(row, table.gpu, of.kin, judge.gpu)
    limit = _limit_of(of, judge)
    if latency is None or limit is None or row.batch > 1:
        return latency
    least = limit.least_s(row.recipe)
    if latency.point >= least:
        return latency
    if not is_elsewhere and row.predicted_from is None:
        return None
    return Interval(least, least, max(least, latency.high or least))


def _limit_of(of: RankedTable, judge: RowFilter) -> ChipLimit | None:
    """Return the limit of the requested GPU, or of the table's, for a table's number of steps."""
    table, published = of.table, judge.published
    steps = of.kin.steps if table.kind != "own" else table.steps
    limit = chip_limit(of.kin.architecture, judge.gpu or table.gpu, steps)
    sizes = (table.height, table.width)
    is_own_size = published is not None and sizes in ((None, None), (published.height, published.width))
    return limit if is_own_size and table.task == (published.task if published else "text") else None


def _basis_of(source: RankedTable, gpu: str | None) -> Basis:
    names = {Near.SAME: "same", Near.GENERATION: "generation", Near.OTHER: "other"}
    near = "any" if gpu is None else names[source.near]
    own = {name: getattr(source.table, name) for name in Basis.model_fields if name != "near"}
    return Basis(**own, near=near)


def at_own_steps(table: EvidenceTable, kin: Kin) -> EvidenceTable:
    """Return a record of vivace's at the model's own number of steps: each row's steps take proportionally longer.

    A row without the time of its steps in the record, or whose recipe sets their number, has no time and no
    gain there. Tables of other models, the user's own, and published ones stay as they are.
    """
    own = kin.steps
    if table.kind != "committed" or table.model != kin.name or own is None or table.steps in (None, own):
        return table
    assert table.steps is not None
    first, *others = [_scaled(row, own, table.steps) for row in table.rows]
    base = first.latency
    if base is not None:
        others = [
            row
            if row.latency is None or row.gain is None
            else row.model_copy(update={"gain": _stretched(row.gain, base.point / row.latency.point)})
            for row in others
        ]
    return table.model_copy(update={"steps": own, "rows": (first, *others)})


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
    update = {
        "latency": _stretched(row.latency, row.latency.point + row.steps_s * (factor - 1)),
        "steps_s": row.steps_s * factor,
        "timed_steps": None if timed_steps == own_steps else timed_steps,
        "spread": None,
    }
    return row.model_copy(update=update)


def _stretched(figure: Interval, point: float) -> Interval:
    stretch = point / figure.point
    low, high = figure.low, figure.high
    return Interval(point, None if low is None else low * stretch, None if high is None else high * stretch)


def _sets_steps(recipe: str) -> bool:
    try:
        return any(
            isinstance(technique, Steps) or technique.facts.trained_steps
            for technique in resolve_cached(recipe)
        )
    except RecipeError:
        return False


def _objection(answer: Recommendation, judge: RowFilter) -> LeftOut | None:
    """Return the chosen recipe with what is wrong with the answer; None if nothing is."""
    chosen, basis, limit = answer.chosen, answer.basis, answer.limit
    if chosen is None or basis is None:
        return None

    def out(kind: Reason, why: str) -> LeftOut:
        return LeftOut(recipe=chosen.recipe, label=chosen.label, kind=kind, why=why, score=chosen.score.point)

    try:
        recipe = resolve_cached(chosen.recipe)
    except RecipeError as error:
        return out("hardware", f"this version of vivace cannot read it: {error.problem}")
    if limit is not None and chosen.latency is not None and chosen.batch == 1:
        took, least = chosen.latency.point, limit.least_s(chosen.recipe)
        if took < _ROUNDING * least:
            return out("no figure", f"{seconds(took)} is below the {seconds(least)} of {limit.gpu}")
    if basis.kind != "own" and any(technique.facts.num_gpus > 1 for technique in recipe):
        return out("hardware", "it needs several GPUs")
    allowed = judge.most_bytes
    if allowed is None or basis.kind == "own" or basis.device != "cuda":
        return None
    if judge.most_needed(chosen) <= allowed or (need := _predicted_bytes(chosen, judge)) <= allowed:
        return None
    return out("memory", f"`vivace plan` counts {size(need)} for it, and {size(allowed)} are there")


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
        return prediction_of(model, resolve_cached(chosen.recipe), published, chosen.peak_bytes).needed_bytes
    except (VivaceError, OSError):
        return chosen.peak_bytes or 0


def prediction_of(
    model: Weightless, recipe: Recipe, published: Prediction, recorded_bytes: float | None
) -> Prediction:
    """Return the prediction of a recipe; an upper estimate where none can be made, as for CUDA graphs.

    The estimate is the recipe without the technique plus a step's activations, which a graph's pool keeps; or the
    recorded memory, if that is larger.
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
