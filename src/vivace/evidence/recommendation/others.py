"""Further notes: other sources, other models, and missing evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vivace.evidence.recommendation.criteria import Criteria
from vivace.evidence.recommendation.kin import Kin, kin_of
from vivace.evidence.recommendation.ranking import NOISE, Ranked, gain_of
from vivace.evidence.recommendation.recommendation import Basis, Elsewhere, OtherModel, RecipeFigures
from vivace.evidence.recommendation.row_filter import RowFilter
from vivace.evidence.recommendation.speed_limit import ChipLimit, chip_limit
from vivace.evidence.recommendation.weighing import RankedTable, projected
from vivace.evidence.tables import EvidenceRow
from vivace.foundation.hardware import Near
from vivace.foundation.stats import Gate, Interval

_MOST_ELSEWHERE = 3
_MOST_NEARER = 2


def safe_choice(best: RankedTable, weighed: Sequence[RankedTable], judge: RowFilter) -> Elsewhere | None:
    """Return the best recipe that keeps the image, if the chosen one changes it without proof of its quality."""
    assert best.choice is not None
    chosen = figures_of(best.choice.chosen, best, judge)
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
    return Elsewhere(basis=basis_of(source, judge.gpu), best=figures_of(ranked, source, judge))


def other_sources(best: RankedTable, weighed: Sequence[RankedTable], judge: RowFilter) -> Iterator[Elsewhere]:
    """Yield the advice of other tables, the best evidence first, once per source, model and GPU.

    The recipe with the largest recorded gain on a GPU of the same generation is among them if it gains more than the
    chosen one.
    """
    best_by_place: dict[tuple[str, str, str], RankedTable] = {}
    for source in weighed:
        key = (source.table.place, source.table.model, source.table.gpu)
        is_best = key == (best.table.place, best.table.model, best.table.gpu)
        if (
            is_best
            or source.table.kind == "predicted"
            or not source.is_comparison
            or source.choice is None
            or source.choice.chosen.row is source.table.rows[0]
            or source.choice.chosen.row.num_techniques == 0
            or (source.score <= 1 and not source.is_small and source.goal != "stability")
        ):
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
        figures = figures_of(source.choice.chosen, source, judge)
        if source.table.gpu != best.table.gpu:
            figures = figures.model_copy(update={"cost_per_1000": None})  # the price is of one GPU
        yield Elsewhere(basis=basis_of(source, judge.gpu), best=figures, gains_more=source is most)


def fewer_steps(best: RankedTable, weighed: Sequence[RankedTable]) -> OtherModel | None:
    """Return the fastest model of the family with at most half the steps, of the same source and on the same GPU."""
    times = {}
    for source in weighed:
        if (
            source.choice is not None
            and source.table.kind != "predicted"
            and source.choice.chosen.row.latency is not None
            and source.table.gpu == best.table.gpu
        ):
            times[source.table.place, source.table.model] = (source, source.choice.chosen.row)
    models = []
    for (place, model), (source, row) in times.items():
        beside = times.get((place, best.table.model))
        mine, theirs = best.kin.steps, kin_of(model, frozenset((model,))).steps
        if beside is None or mine is None or theirs is None or 2 * theirs > mine:
            continue
        latency, instead_of = row.latency, beside[1].latency
        assert latency is not None
        assert instead_of is not None
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


def missing_evidence(
    weighed: Sequence[RankedTable], kin: Kin, criteria: Criteria, gpu: str | None, best: RankedTable | None
) -> tuple[str, ...]:
    """Describe the missing evidence, from the model's own on this GPU downwards."""
    task, num_gpus = criteria.task, criteria.num_gpus
    weighed = [source for source in weighed if source.table.kind != "predicted"]
    own = [source for source in weighed if not source.is_transferred and len(source.table.compared) > 1]
    sentences = []
    if not own:
        family = list(dict.fromkeys(source.table.model for source in weighed if source.is_transferred))
        family_note = (
            f"; of its family: {', '.join(family)}" if family else ", nor on another model of its family"
        )
        what = kin.name if task == "text" else f"the task '{task}' of {kin.name}"
        sentences.append(f"no record compares recipes on {what}{family_note}")
    if gpu is None:
        sentences.append(
            "no GPU was named, and this machine has none: the answer is for the GPU of its records"
        )
    elif own and not any(source.near is Near.SAME for source in own):
        names = list(dict.fromkeys(source.table.gpu for source in own if source.near is Near.GENERATION))
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


def figures_of(ranked: Ranked, of: RankedTable, judge: RowFilter) -> RecipeFigures:
    """Return a row's figures, with its time on the requested GPU."""
    row, table, criteria = ranked.row, of.table, judge.criteria
    latency = time_here(row, of, judge)
    # Seconds of another model, with steps and a size of its own, are none of this one's.
    is_elsewhere = of.near is not Near.SAME and not of.is_transferred
    is_projected = is_elsewhere and row.predicted_from is None and row.latency is not None
    cost = None
    if criteria.price_per_hour is not None and latency is not None and of.near is Near.SAME:
        cost = criteria.price_per_hour / 3600 * latency.point * 1000
    return RecipeFigures(
        recipe=row.recipe,
        label=row.label,
        batch=row.batch,
        num_techniques=row.num_techniques,
        same_picture=judge.keeps(row, table),
        score=ranked.score,
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
        judged=judge.judgement_of(row, table),
        note=row.note,
    )


def time_here(row: EvidenceRow, of: RankedTable, judge: RowFilter) -> Interval | None:
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


def limit_of(of: RankedTable, judge: RowFilter) -> ChipLimit | None:
    """Return the limit of the requested GPU, or of the table's, for a table's number of steps."""
    entry_steps = of.kin.steps if of.table.kind != "own" else of.table.steps
    published = judge.published
    limit = chip_limit(of.kin.architecture, judge.gpu or of.table.gpu, entry_steps)
    sizes = (of.table.height, of.table.width)
    is_own_size = published is not None and sizes in ((None, None), (published.height, published.width))
    return limit if is_own_size and of.table.task == (published.task if published else "text") else None


def basis_of(source: RankedTable, gpu: str | None) -> Basis:
    table = source.table
    name = (
        "any" if gpu is None else {Near.SAME: "same", Near.GENERATION: "generation"}.get(source.near, "other")
    )
    return Basis(
        kind=table.kind,
        place=table.place,
        model=table.model,
        of=table.of,
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
