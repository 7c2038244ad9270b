"""Turn a study into comparisons, and check models, recipes, prompts and sizes before any process starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vivace.errors import RecipeError, UsageError
from vivace.foundation.spec.study import Study
from vivace.foundation.spec.trial import Trial
from vivace.foundation.spec.workload import Workload
from vivace.machinery.technique import Stage
from vivace.measure.scorer import check_lpips
from vivace.models.controlnet import RANDOM
from vivace.models.find import LocatedModel, find_model, obtain
from vivace.models.sources import SourceImages
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.runtime.workloads import default_threads as default_threads
from vivace.runtime.workloads import workload_and_images
from vivace.techniques.steps import Steps

# Shares of the steps that the cache's recipe takes. A cache that saves less than a quarter of the work is hardly worth
# using, and one that saves more than half has to beat half the steps first.
_SHARES = (0.75, 0.5)


@dataclass(frozen=True)
class Comparison:
    """Recipes to compare on one model at one batch size; the first recipe is the baseline. Checked, not started.

    A repeated recipe is measured twice, for a comparison with itself.

    Attributes:
        largest_batch: find the largest batch that fits the GPU with the baseline, and use it for all recipes.
        images: that the workload starts from; None for text.
        judged: whether the images are compared with the baseline's.
        rival_of: by the index of a recipe that was added as a rival, those of the step caches' recipes.
    """

    located: LocatedModel
    recipes: tuple[Recipe, ...]
    workload: Workload
    largest_batch: bool = False
    judged: bool = True
    sources: SourceImages | None = None
    rival_of: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def trials(self, device: str) -> list[Trial]:
        texts = [recipe.text for recipe in self.recipes]
        return [
            Trial(
                model=self.located.model,
                recipe=recipe.spec,
                workload=self.workload,
                device=device,
                repetition=texts[:index].count(recipe.text),
            )
            for index, recipe in enumerate(self.recipes)
        ]


def comparisons(study: Study) -> tuple[Comparison, ...]:
    """Return a study's comparisons, having checked all that can be checked before a process starts."""
    if not study.recipes:
        raise UsageError(
            "no recipe given; the first --recipe is the baseline that the others are compared with"
        )
    recipes = [resolve(text).pinned() for text in study.recipes]
    checked = []
    for name in dict.fromkeys(study.models):
        located = find_model(name)
        for batch in study.workload.batches:
            workload, images = workload_and_images(located, study.workload, batch)
            steps = workload.num_inference_steps
            compared_recipes = with_rivals(recipes, steps) if study.rivals else recipes
            checked.append(
                Comparison(
                    located,
                    tuple(compared_recipes),
                    workload,
                    largest_batch=batch == "max",
                    judged=study.quality.enabled
                    and not located.model.is_synthetic
                    and workload.controlnet != RANDOM,
                    sources=images,
                    rival_of=owners(recipes, compared_recipes, steps) if study.rivals else {},
                )
            )
        if study.quality.enabled:
            check_quality_options(located, *quality_flags(study))
    if study.quality.enabled and study.quality.lpips:
        check_lpips()
    obtained = {comparison.located.model.name: obtain(comparison.located) for comparison in checked}
    return tuple(
        replace(comparison, located=obtained[comparison.located.model.name]) for comparison in checked
    )


def quality_flags(study: Study) -> list[str]:
    """Return the command-line options of a study that explicitly request quality metrics."""
    quality = study.quality
    flags = {
        "--scorer": quality.scorer not in (None, "auto"),
        "--witness": quality.witness is not None,
        "--lpips": quality.lpips,
    }
    return [flag for flag, is_asked in flags.items() if is_asked]


def check_quality_options(located: LocatedModel, *flags: str) -> None:
    """Refuse options about image quality, as they were typed, for a model with random weights."""
    if flags and located.model.is_synthetic and located.entry is not None:
        raise UsageError(
            f"{flags[0]}: {located.model.name} has random weights, so its images have no quality to measure; "
            f"leave out {flags[0]}, or measure {located.entry.name}"
        )


def with_rivals(recipes: list[Recipe], num_inference_steps: int) -> list[Recipe]:
    """Return the recipes, each one with a step cache followed by its rivals, unless they are there already."""
    there = {recipe.text for recipe in recipes}
    recipes_with_rivals = []
    for recipe in recipes:
        rivals = [rival for rival in _rivals(recipe, num_inference_steps) if rival.text not in there]
        recipes_with_rivals += [recipe, *rivals]
        there |= {rival.text for rival in rivals}
    return recipes_with_rivals


def owners(
    recipes: list[Recipe], all_recipes: list[Recipe], num_inference_steps: int
) -> dict[int, tuple[int, ...]]:
    """Return, by the index of each rival that `with_rivals` added, the indices of the recipes whose rival it is."""
    texts = {recipe.text for recipe in recipes}
    places = {recipe.text: index for index, recipe in enumerate(all_recipes)}
    owners_of: dict[int, tuple[int, ...]] = {}
    for index, recipe in enumerate(all_recipes):
        for rival in _rivals(recipe, num_inference_steps):
            if rival.text not in texts:
                place = places[rival.text]
                owners_of[place] = (*owners_of.get(place, ()), index)
    return owners_of


def _rivals(recipe: Recipe, num_inference_steps: int) -> list[Recipe]:
    caches = [technique for technique in recipe if technique.facts.stage is Stage.CACHE]
    if not caches:
        return []
    plain = recipe.without(*caches)
    steps = next((t.steps for t in plain if isinstance(t, Steps)), num_inference_steps)
    rivals = []
    for share in _SHARES:
        fewer = round(share * steps)
        if 1 <= fewer < steps:
            try:
                rivals.append(plain.without(Steps.name).with_(Steps(steps=fewer)))
            except RecipeError:
                continue  # another technique of the recipe sets the steps
    return rivals
