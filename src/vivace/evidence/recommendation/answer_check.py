"""The check that every answer passes before it is shown: its time, its memory, the device, and what it names."""

from __future__ import annotations

from typing import Any

from vivace.errors import RecipeError, Unpredictable, VivaceError
from vivace.evidence.parsed import resolve
from vivace.evidence.recommendation.recommendation import LeftOut, Reason, RecipeFigures, Recommendation
from vivace.evidence.recommendation.row_filter import RowFilter
from vivace.recipes.recipe import Recipe
from vivace.report.summary import seconds, size
from vivace.runtime.memory.footprints import footprints
from vivace.runtime.memory.predict import Prediction
from vivace.runtime.memory.remembered import predicted
from vivace.runtime.memory.weightless import Weightless, find_weightless

_ROUNDING = 0.999


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
    if basis.kind != "own" and any(technique.num_gpus > 1 for technique in recipe):
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
    """Return the memory of a recipe as `vivace plan` counts it, which takes seconds; that of its record if it cannot."""
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
