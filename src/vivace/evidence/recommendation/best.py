"""The word `best` in a recipe: the best recipe known for a model on this card, by the rule of `vivace recommend`.

best                    keeps the image, fits the card's free memory
best(8GB)               needs no more than this
best(changes=True)      may change the image, if its quality is proven
best+lora(a.safetensors)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from vivace.benchmark.rounds.support import support_of
from vivace.errors import RecipeError, UsageError, VivaceError
from vivace.evidence.recommendation.advise import recommend
from vivace.evidence.recommendation.answer import disturbance_of, how_known
from vivace.evidence.recommendation.recommendation import Recommendation
from vivace.foundation.hardware import present_gpu
from vivace.foundation.spec.arguments import parse_bytes
from vivace.foundation.spec.recipe_syntax import BASELINE, BEST, parse_recipe
from vivace.foundation.spec.workload import Task
from vivace.models.quiet import quiet
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.fit import RESERVE_BYTES

_MOST_TRIED = 6
_SAFE = ("bf16+fused+cuda_graph", "fused+cuda_graph", "bf16+compile", "compile", "bf16")
"""For a GPU on which nothing is known of the model: the first that works there, whose techniques keep the image."""


@dataclass(frozen=True)
class BestRecipe:
    """What `best` became."""

    recipe: str
    why: str

    def __str__(self) -> str:
        return f"{BEST} is {self.recipe}: {self.why}"


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

    max_bytes, changes, others = _read(recipe)
    place = "cuda" if gpu is not None else choose_device(device)
    card = present_gpu() if place == "cuda" and gpu is None else None
    free = None if card is None else card.free_bytes - RESERVE_BYTES
    limit = min((most for most in (max_bytes, free) if most is not None), default=None)
    answer = recommend(
        model,
        gpu="cpu" if place == "cpu" else gpu,
        max_memory=None if limit is None else limit / 1e9,
        same_picture=not changes,
        task=task,
    )
    disturbed = [f"{disturbance_of(answer)}: {answer.next[0]}"] if answer.disturbed else []
    passed_over: list[str] = []
    for candidate, basis in _candidates(answer, place):
        text, why = candidate, None
        try:
            text = resolve(f"{candidate}+{others}").text if others else candidate
        except RecipeError:
            why = f"it excludes {others}"
        if why is None and gpu is None:
            why = _refusal(model, text, device, task)
        if why is None:
            return BestRecipe(resolve(text).text, "; ".join((basis, *passed_over, *disturbed)))
        passed_over.append(f"not {candidate}: {why}")
    text = resolve(others or BASELINE).text
    reasons = ("nothing faster is known to keep the image here", *passed_over, *disturbed)
    return BestRecipe(text, "; ".join(reasons))


def _read(recipe: str) -> tuple[float | None, bool, str]:
    """Return the arguments of `best`: the most bytes, and whether the image may change; and what stands beside it."""
    parts = parse_recipe(recipe)
    best, *again = [part for part in parts if part.name == BEST]
    if again:
        raise RecipeError(f"'{BEST}' is given twice", recipe, again[0].start, len(BEST))
    if best.targets:
        name, place = best.targets[0]
        raise RecipeError(
            f"'{BEST}' is for the whole pipeline, and takes no target", recipe, place, len(name)
        )
    given: dict[str, Any] = {}
    for argument in best.arguments:
        name = argument.name or ("changes" if isinstance(argument.value, bool) else "memory")
        expected = {"memory": (str, int, float), "changes": (bool,)}.get(name)
        problem = f"'{BEST}' takes a memory limit (8GB) and changes=True, each once"
        if expected is not None and name not in given and isinstance(argument.value, expected):
            try:
                given[name] = parse_bytes(argument.value) if name == "memory" else argument.value
                continue
            except UsageError as error:
                problem = str(error)
        raise RecipeError(problem, recipe, argument.start, argument.length)
    starts = [*(part.start for part in parts), len(recipe) + 1]
    written = [recipe[start:end].strip().removesuffix("+").strip() for start, end in pairwise(starts)]
    others = "+".join(text for text, part in zip(written, parts, strict=True) if part is not best)
    if others:
        resolve(others)  # mistakes in them are told before anything is searched
    return given.get("memory"), given.get("changes", False), others


def _candidates(answer: Recommendation, place: str) -> Iterator[tuple[str, str]]:
    """Yield recipes with what they rest on, the best first.

    Where the model as published does not fit, what does is better, however slow.
    """
    basis = answer.basis
    if basis is None:
        for text in _SAFE if place == "cuda" else ():
            yield (
                text,
                "no record or prediction of this model on this card; techniques that are safe on any model",
            )
        return
    most, published = answer.most_bytes, answer.published_bytes
    is_small = most is not None and published is not None and published > most
    ranked = [figures for figures in answer.ranking if figures.recipe != answer.recipe]
    for figures in [*([] if answer.chosen is None else [answer.chosen]), *ranked][:_MOST_TRIED]:
        if figures.recipe == BASELINE or (figures.score.point <= 1 and not is_small):
            continue
        known, origin = how_known(figures, basis)
        gain = "" if figures.gain is None else f"{figures.gain.point:.2f}x {basis.baseline}, "
        kept = "keeps the image" if figures.same_picture else "changes the image, and passed the quality gate"
        yield figures.recipe, f"{gain}{' '.join(filter(None, (known, origin)))} ({basis.place}), {kept}"


def _refusal(model: str, recipe: str, device: str, task: Task | None) -> str | None:
    try:
        with quiet():
            return support_of(model, [recipe], device, task).reasons.get(recipe)
    except VivaceError as error:
        return str(error)
