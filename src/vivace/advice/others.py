"""What else there is to say: other sources, other models, and which evidence is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vivace.advice.allowed import Judge
from vivace.advice.answer import Elsewhere, OtherModel
from vivace.advice.families import Kin, kin_of
from vivace.advice.ranking import NOISE
from vivace.advice.weighing import Weighed, basis_of, figures_of
from vivace.hardware import Near
from vivace.spec.workload import Task
from vivace.stats import Gate

_MOST_ELSEWHERE = 3
_MOST_NEARER = 2


def safe_choice(best: Weighed, weighed: Sequence[Weighed], judge: Judge) -> Elsewhere | None:
    """Return the best that keeps the image, if the chosen recipe changes it without proof of its quality."""
    assert best.choice is not None
    chosen = figures_of(best.choice.chosen, best, judge)
    if chosen.same_picture or (chosen.judged is not None and chosen.judged.gate is Gate.PASSED):
        return None
    found = [
        (ranked.score.point, one, ranked)
        for one in weighed
        if one.order == best.order and one.choice is not None and one.is_comparison
        for ranked in one.choice.ranking
        if judge.keeps(ranked.row, one.table)
    ]
    if not found:
        return None
    _, one, ranked = max(found, key=lambda each: each[0])
    return Elsewhere(basis=basis_of(one, judge.gpu), best=figures_of(ranked, one, judge))


def other_sources(best: Weighed, weighed: Sequence[Weighed], judge: Judge) -> Iterator[Elsewhere]:
    """Yield what other tables advise, the best evidence first; once for each source, model and GPU.

    What gains most by a record on a GPU of the same generation has a place among them, if it gains more than the chosen
    recipe: it is worth trying.
    """
    found: dict[tuple[str, str, str], Weighed] = {}
    for one in weighed:
        key = (one.table.place, one.table.model, one.table.gpu)
        is_best = key == (best.table.place, best.table.model, best.table.gpu)
        if (
            is_best
            or one.table.kind == "predicted"
            or not one.is_comparison
            or one.choice is None
            or one.choice.chosen.row is one.table.rows[0]
            or one.choice.chosen.row.num_techniques == 0
        ):
            continue
        if key not in found or one.score > found[key].score:
            found[key] = one
    direct = [one for one in found.values() if not one.is_transferred]
    transferred = [one for one in found.values() if one.is_transferred]
    shown = direct[:_MOST_ELSEWHERE]
    faster = [
        one
        for one in direct
        if one.near is Near.GENERATION and one.table.kind != "published" and one.gain_over(best) > 1 + NOISE
    ]
    most = max(faster, key=lambda one: one.gain_over(best), default=None)
    if most is not None and most not in shown:
        shown = [*shown[:-1], most]
    for one in [*shown, *transferred[: max(1, _MOST_ELSEWHERE - len(direct))]]:
        assert one.choice is not None
        figures = figures_of(one.choice.chosen, one, judge)
        if one.table.gpu != best.table.gpu:
            figures = figures.model_copy(update={"cost_per_1000": None})  # the price is of one GPU
        yield Elsewhere(basis=basis_of(one, judge.gpu), best=figures, gains_more=one is most)


def fewer_steps(best: Weighed, weighed: Sequence[Weighed]) -> OtherModel | None:
    """Return the fastest model of the family with at most half the steps, of the same source and on the same GPU."""
    times = {}
    for one in weighed:
        if (
            one.choice is not None
            and one.table.kind != "predicted"
            and one.choice.chosen.row.latency is not None
            and one.table.gpu == best.table.gpu
        ):
            times[one.table.place, one.table.model] = (one, one.choice.chosen.row)
    found = []
    for (place, model), (one, row) in times.items():
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
                steps=one.table.steps or theirs,
                place=place,
                gpu=one.table.gpu,
            )
            found.append(other)
    return max(found, key=lambda other: other.ratio, default=None)


def missing_evidence(
    weighed: Sequence[Weighed], kin: Kin, gpu: str | None, best: Weighed | None, task: Task = "text"
) -> tuple[str, ...]:
    """Say which evidence there is not, from the model's own on this GPU downwards."""
    weighed = [one for one in weighed if one.table.kind != "predicted"]
    own = [one for one in weighed if not one.is_transferred and len(one.table.compared) > 1]
    said = []
    if not own:
        family = list(dict.fromkeys(one.table.model for one in weighed if one.is_transferred))
        told = f"; of its family: {', '.join(family)}" if family else ", nor on another model of its family"
        what = kin.name if task == "text" else f"the task '{task}' of {kin.name}"
        said.append(f"no record compares recipes on {what}{told}")
    if gpu is None:
        said.append("no GPU was named, and this machine has none: the answer is for what it was measured on")
    elif own and not any(one.near is Near.SAME for one in own):
        names = list(dict.fromkeys(one.table.gpu for one in own if one.near is Near.GENERATION))
        of_generation = f"; of its generation: {', '.join(names)}" if names else ", nor on its generation"
        said.append(f"no record of {kin.name} on {gpu}{of_generation}")
    if not any(one.table.kind == "own" and not one.is_transferred for one in weighed):
        said.append("you have no records of it")
    nearer = [one for one in weighed if best is not None and one.order < best.order and not one.is_comparison]
    for one in nearer[:_MOST_NEARER]:
        why = f" ({one.left_out[0].title}: {one.left_out[0].why})" if one.left_out else ""
        said.append(f"{one.table.place} is nearer, but compares nothing that is allowed{why}")
    return tuple(said)
