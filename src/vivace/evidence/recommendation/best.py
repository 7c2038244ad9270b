"""The word `best` in a recipe: the best recipe known for a model on this card, by the rule of `vivace recommend`.

best                    keeps the image, fits the card's free memory
best(8GB)               needs no more than this
best(changes=True)      may change the image, if its quality is proven
best+lora(a.safetensors)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from vivace.benchmark.rounds.support import support_of
from vivace.errors import RecipeError, UsageError, VivaceError
from vivace.evidence.recommendation.advise import recommend
from vivace.evidence.recommendation.recommendation import Recommendation
from vivace.foundation.hardware import present_gpu
from vivace.foundation.spec.arguments import parse_bytes
from vivace.foundation.spec.recipe_syntax import BASELINE, BEST, ParsedTechnique, parse_recipe
from vivace.foundation.spec.workload import Task
from vivace.models.quiet import quiet
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.fit import RESERVE_BYTES

_MOST_TRIED = 6
_SAFE = ("bf16+fused+cuda_graph", "fused+cuda_graph", "bf16+compile", "compile", "bf16")
"""For a GPU on which nothing is known of the model: the first that works there, whose techniques keep the image."""


@dataclass(frozen=True)
class BestRecipe:
    """What `best` became.

    Attributes:
        recipe: in canonical form.
        why: what it rests on, and what was passed over and why; one line.
    """

    recipe: str
    why: str

    def __str__(self) -> str:
        return f"{BEST} is {self.recipe}: {self.why}"


@dataclass(frozen=True)
class _Wish:
    max_bytes: float | None
    changes: bool
    others: str
    """What else the recipe asks for, as written; "" for nothing."""


def is_best(recipe: str) -> bool:
    """Whether a recipe's text names `best`; a text that is no recipe does not."""
    try:
        return any(part.name == BEST for part in parse_recipe(recipe))
    except RecipeError:
        return False


def best_recipe(
    recipe: str, model: str, *, device: str = "auto", gpu: str | None = None, task: Task | None = None
) -> BestRecipe:
    """Return what a recipe with `best` becomes for a model on this machine. Nothing is loaded or measured.

    Args:
        recipe: "best", alone or with further techniques.
        model: what `vivace.load` takes.
        device: as for `vivace.load`.
        gpu: another card, for which techniques are not asked whether this machine has what they need.
        task: what is generated from; None for what the model is published for.

    Raises:
        RecipeError: what stands beside `best`, or its arguments, are wrong.
        UnknownModel, UnusableModel, UsageError: see `vivace.errors`.
    """
    from vivace.measure.machine import choose_device

    wish = _wish(recipe)
    place = "cuda" if gpu is not None else choose_device(device)
    card = present_gpu() if place == "cuda" and gpu is None else None
    free = None if card is None else card.free_bytes - RESERVE_BYTES
    limit = min((most for most in (wish.max_bytes, free) if most is not None), default=None)
    answer = recommend(
        model,
        gpu="cpu" if place == "cpu" else gpu,
        max_memory=None if limit is None else limit / 1e9,
        same_picture=not wish.changes,
        task=task,
    )
    passed_over: list[str] = []
    for candidate, basis in _candidates(answer, place):
        text = _joined(candidate, wish.others)
        why = f"it excludes {wish.others}" if text is None else None
        if text is not None and gpu is None:
            why = _refusal(model, text, device, task)
        if text is None or why is not None:
            passed_over.append(f"not {candidate}: {why}")
            continue
        return BestRecipe(resolve(text).text, "; ".join((basis, *passed_over)))
    text = resolve(wish.others or BASELINE).text
    return BestRecipe(text, "; ".join(("nothing faster is known to keep the image here", *passed_over)))


def _wish(recipe: str) -> _Wish:
    """Return the arguments of `best`, and what stands beside it.

    Raises:
        RecipeError: they are wrong, or `best` stands there twice.
    """
    parts = parse_recipe(recipe)
    bests = [part for part in parts if part.name == BEST]
    if len(bests) > 1:
        raise RecipeError(f"'{BEST}' is given twice", recipe, bests[1].start, len(BEST))
    (best,) = bests
    if best.targets:
        name, place = best.targets[0]
        raise RecipeError(
            f"'{BEST}' is for the whole pipeline, and takes no target", recipe, place, len(name)
        )
    given: dict[str, Any] = {}
    for argument in best.arguments:
        name = argument.name or ("changes" if isinstance(argument.value, bool) else "memory")
        expected = {"memory": (str, int, float), "changes": (bool,)}.get(name)
        if expected is None or name in given or not isinstance(argument.value, expected):
            raise RecipeError(
                f"'{BEST}' takes a memory limit (8GB) and changes=True, each once",
                recipe,
                argument.start,
                argument.length,
            )
        given[name] = argument.value
    try:
        max_bytes = parse_bytes(given["memory"]) if "memory" in given else None
    except UsageError as error:
        argument = best.arguments[0]
        raise RecipeError(str(error), recipe, argument.start, argument.length) from None
    others = "+".join(_written(recipe, parts, part) for part in parts if part is not best)
    if others:
        resolve(others)  # mistakes in them are told before anything is searched
    return _Wish(max_bytes, given.get("changes", False), others)


def _written(recipe: str, parts: Iterable[ParsedTechnique], part: ParsedTechnique) -> str:
    end = min((other.start for other in parts if other.start > part.start), default=len(recipe) + 1)
    return recipe[part.start : end].strip().removesuffix("+").strip()


def _candidates(answer: Recommendation, place: str) -> Iterator[tuple[str, str]]:
    """Yield recipes with what they rest on, the best first."""
    ranked = [figures for figures in answer.ranking if figures.recipe != answer.recipe]
    first = [] if answer.chosen is None else [answer.chosen]
    basis = answer.basis
    for figures in [*first, *ranked][:_MOST_TRIED]:
        if basis is None or figures.recipe == BASELINE or figures.score.point <= 1:
            continue
        gain = "" if figures.gain is None else f"{figures.gain.point:.2f}x {basis.baseline}, "
        how = "by its operations, counted" if figures.is_counted else f"measured on {basis.gpu}"
        how = "predicted" if figures.is_estimated else how
        kept = "keeps the image" if figures.same_picture else "changes the image, and passed the quality gate"
        yield figures.recipe, f"{gain}{how} ({basis.place}), {kept}"
    if basis is None and place == "cuda":
        for text in _SAFE:
            yield (
                text,
                "no record or prediction of this model on this card; techniques that are safe on any model",
            )


def _joined(recipe: str, others: str) -> str | None:
    """Return a recipe with further techniques; None if they conflict."""
    if not others:
        return recipe
    try:
        return resolve(f"{recipe}+{others}").text
    except RecipeError:
        return None


def _refusal(model: str, recipe: str, device: str, task: Task | None) -> str | None:
    """Return why a recipe does not work here; None if it may."""
    try:
        with quiet():
            return support_of(model, [recipe], device, task).reasons.get(recipe)
    except VivaceError as error:
        return str(error)
