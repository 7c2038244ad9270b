"""Turn a study into comparisons, and check models, recipes, prompts and sizes before any process starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vivace.benchmark.rivals import owners, with_rivals
from vivace.errors import UsageError, WorkloadError, nearest
from vivace.measure.lpips import check as check_lpips
from vivace.models.find import Found, find_model, obtain
from vivace.models.prompts import NUM_DEFAULT, NUM_SEEDS, PROMPT_SETS
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.spec.study import AskedWorkload, Batch, Study
from vivace.spec.words import Checked
from vivace.spec.workload import MAX_PIXEL_STEPS, Workload

# For models without prompts in the catalogue.
DEFAULT_PROMPTS = PROMPT_SETS["real"][:NUM_DEFAULT]


@dataclass(frozen=True)
class Comparison:
    """Recipes to compare on one model at one batch size; the first recipe is the baseline. Checked, not started.

    A recipe that is given twice is measured twice, for a comparison with itself.

    Attributes:
        largest_batch: find the largest batch that fits the GPU with the baseline, and use it for all recipes.
        judged: whether the images are compared with the baseline's.
        rival_of: by the index of a recipe that was added as a rival, those of the step caches' recipes.
    """

    found: Found
    recipes: tuple[Recipe, ...]
    workload: Workload
    largest_batch: bool = False
    judged: bool = True
    rival_of: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def comparisons(study: Study) -> tuple[Comparison, ...]:
    """Return a study's comparisons, having checked all that can be checked before a process starts.

    Raises:
        UnknownModel, UnusableModel, Unsupported, RecipeError, WorkloadError, UsageError: see `vivace.errors`.
    """
    if not study.recipes:
        raise UsageError(
            "no recipe given; the first --recipe is the baseline that the others are compared with"
        )
    recipes = [resolve(text) for text in study.recipes]
    checked = []
    for name in dict.fromkeys(study.models):
        found = find_model(name)
        for batch in study.workload.batches:
            workload = workload_of(found, study.workload, batch)
            steps = workload.num_inference_steps
            wanted = with_rivals(recipes, steps) if study.rivals else recipes
            checked.append(
                Comparison(
                    found,
                    tuple(wanted),
                    workload,
                    largest_batch=batch == "max",
                    judged=study.quality.enabled and not found.model.is_synthetic,
                    rival_of=owners(recipes, wanted, steps) if study.rivals else {},
                )
            )
        if study.quality.enabled:
            check_judged(found, *quality_flags(study))
    if study.quality.enabled and study.quality.lpips:
        check_lpips()
    obtained = {one.found.model.name: obtain(one.found) for one in checked}
    return tuple(replace(one, found=obtained[one.found.model.name]) for one in checked)


def comparison_of(model: str, recipe: str, **fields: Any) -> Comparison:
    """Return the comparison of a single recipe on one model, for generating images.

    Args:
        fields: as for `vivace.bench`.

    Raises:
        UnknownModel, UnusableModel, Unsupported, RecipeError, WorkloadError, UsageError: see `vivace.errors`.
    """
    (found,) = comparisons(Study.of(model, [recipe], quality=False, rivals=False, **fields))
    return found


def quality_flags(study: Study) -> list[str]:
    """Return the command-line options of a study that explicitly request quality metrics."""
    quality = study.quality
    asked = {
        "--scorer": quality.scorer not in (None, "auto"),
        "--witness": quality.witness is not None,
        "--lpips": quality.lpips,
    }
    return [flag for flag, is_asked in asked.items() if is_asked]


def workload_of(found: Found, asked: AskedWorkload, batch: Batch = 1) -> Workload:
    """Return the workload for one model; fields that are not given take the model's own values.

    Raises:
        UsageError, WorkloadError: a value is invalid, or the model cannot generate it.
    """
    prompts: Sequence[str] | None = asked.prompts
    if asked.prompt_set is not None:
        prompts = _prompts_from_set(asked.prompt_set, prompts)
    if prompts is None:
        prompts = found.entry.prompts if found.entry else DEFAULT_PROMPTS
    if not prompts:
        raise WorkloadError("the list of prompts is empty; give at least one prompt")
    num_seeds = asked.num_seeds
    if num_seeds is None:
        num_seeds = 1 if asked.prompt_set is None else NUM_SEEDS
    if num_seeds < 1:
        raise WorkloadError(f"--seeds {num_seeds}: give at least one seed per prompt")
    given = asked.model_dump(include={"height", "width", "num_inference_steps", "guidance_scale"})
    if found.entry is not None and found.entry.ignores_guidance and asked.guidance_scale is not None:
        raise WorkloadError(_why_ignored(found))
    numbers = found.defaults | {name: value for name, value in given.items() if value is not None}
    with Checked(WorkloadError):
        workload = Workload.model_validate(
            {
                "prompts": prompts,
                "seeds": tuple(range(asked.seed, asked.seed + num_seeds)),
                "batch": 1 if batch == "max" else batch,
                "text": asked.text,
                **numbers,
            }
        )
    check_size(found, workload)
    return workload


def _why_ignored(found: Found) -> str:
    true_cfg = "true_cfg_scale" in found.call
    instead = (
        "its guidance is a second call, set by a recipe: guidance(1, true_cfg=4)"
        if true_cfg
        else "leave it out"
    )
    return f"--guidance-scale: {found.model.name} ignores it; {instead}"


def _prompts_from_set(name: str, prompts: Sequence[str] | None) -> tuple[str, ...]:
    if prompts is not None:
        raise UsageError("--prompts and --prompt-set exclude each other; give one of them")
    if name not in PROMPT_SETS:
        raise UsageError(
            f"no prompt set '{name[:80]}'{nearest(name, PROMPT_SETS)} (there are {', '.join(PROMPT_SETS)})"
        )
    return PROMPT_SETS[name]


def check_judged(found: Found, *flags: str) -> None:
    """Refuse options about image quality for a model with random weights.

    Args:
        flags: options about image quality, as typed; may be empty.

    Raises:
        UsageError: naming the first option.
    """
    if flags and found.model.is_synthetic and found.entry is not None:
        raise UsageError(
            f"{flags[0]}: {found.model.name} has random weights, so its images have no quality to measure; "
            f"leave out {flags[0]}, or measure {found.entry.name}"
        )


def check_size(found: Found, workload: Workload) -> None:
    """Refuse sizes that the model cannot generate.

    Raises:
        WorkloadError: names the nearest size that it can generate.
    """
    multiple = found.entry.size_multiple if found.entry else 8
    largest = found.entry.max_size if found.entry else 8192
    for flag, size in (("--height", workload.height), ("--width", workload.width)):
        nearest_size = min(max(round(size / multiple) * multiple, multiple), largest)
        if size != nearest_size:
            raise WorkloadError(
                f"{flag} {size}: {found.model.name} takes multiples of {multiple} up to {largest} pixels; "
                f"the nearest is {nearest_size}"
            )
    if workload.pixel_steps > MAX_PIXEL_STEPS:
        raise WorkloadError(
            f"{workload.num_pictures} images of {workload.width}x{workload.height} at "
            f"{workload.num_inference_steps} steps are {workload.pixel_steps:.1e} pixel steps, more than "
            f"{MAX_PIXEL_STEPS:.0e}; give fewer or smaller images"
        )


def default_threads(found: Found) -> int:
    """Return the number of CPU threads: the catalogue's, or the number of physical cores.

    It is fixed because the last bits of an image depend on it.
    """
    if found.entry is not None and found.entry.threads is not None:
        return found.entry.threads
    import psutil

    return psutil.cpu_count(logical=False) or os.cpu_count() or 1
