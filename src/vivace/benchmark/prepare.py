"""Check a question before anything is started: model, recipes, prompts, sizes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from vivace.benchmark.rivals import with_rivals
from vivace.errors import UsageError, WorkloadError, nearest
from vivace.models.find import Found, find_model, obtain
from vivace.models.prompts import NUM_SEEDS, PROMPT_SETS
from vivace.recipes.resolve import resolve
from vivace.spec.recipe import Recipe
from vivace.spec.workload import MAX_PIXEL_STEPS, Workload

# For models that bring no prompts of their own.
DEFAULT_PROMPTS = ("a red circle above a blue square", "a lighthouse at dusk", "a bowl of oranges on a table")


@dataclass(frozen=True)
class Prepared:
    """A checked question: model, recipes and workload exist and fit; nothing has been started."""

    found: Found
    recipes: tuple[Recipe, ...]
    workload: Workload


def prepare(
    model: str,
    recipes: Sequence[str],
    *,
    prompts: Sequence[str] | None = None,
    prompt_set: str | None = None,
    seed: int = 0,
    num_seeds: int | None = None,
    height: int | None = None,
    width: int | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    batch: int = 1,
    text: str = "prompts",
    rivals: bool = True,
) -> Prepared:
    """Check everything that can be checked before a process starts. The arguments are those of `vivace.bench`.

    Raises:
        UnknownModel, UnusableModel, Unsupported, RecipeError, WorkloadError: see `vivace.errors`.
    """
    if not recipes:
        raise UsageError(
            "no recipe given; the first --recipe is the baseline that the others are compared with"
        )
    resolved: dict[str, Recipe] = {}
    for written in recipes:
        recipe = resolve(written)
        resolved.setdefault(recipe.text, recipe)
    found = find_model(model)
    entry = found.entry
    if prompt_set is not None:
        prompts = _of_set(prompt_set, prompts)
    chosen = tuple(prompts) if prompts is not None else (entry.prompts if entry else DEFAULT_PROMPTS)
    if not chosen:
        raise WorkloadError("the list of prompts is empty; give at least one prompt")
    if num_seeds is None:
        num_seeds = 1 if prompt_set is None else NUM_SEEDS
    if num_seeds < 1:
        raise WorkloadError(f"--seeds {num_seeds}: at least one seed a prompt is wanted")
    given = {
        "height": height,
        "width": width,
        "num_inference_steps": num_inference_steps,
        "guidance_scale": guidance_scale,
    }
    numbers = found.defaults | {name: value for name, value in given.items() if value is not None}
    try:
        seeds = tuple(range(seed, seed + num_seeds))
        workload = Workload.model_validate(
            {"prompts": chosen, "seeds": seeds, "batch": batch, "text": text, **numbers}
        )
    except ValidationError as error:
        problem = error.errors()[0]
        flag = "--" + "-".join(str(part) for part in problem["loc"][:1]).replace("_", "-")
        raise WorkloadError(f"{flag} {problem.get('input')!r}: {problem['msg']}") from None
    check_size(found, workload)
    wanted = list(resolved.values())
    if rivals:
        wanted = with_rivals(wanted, workload.num_inference_steps)
    return Prepared(obtain(found), tuple(wanted), workload)


def _of_set(name: str, prompts: Sequence[str] | None) -> tuple[str, ...]:
    if prompts is not None:
        raise UsageError("--prompts and --prompt-set both say what to draw; give one of them")
    if name not in PROMPT_SETS:
        raise UsageError(
            f"no prompt set '{name[:80]}'{nearest(name, PROMPT_SETS)} (there are {', '.join(PROMPT_SETS)})"
        )
    return PROMPT_SETS[name]


def check_judged(found: Found, *flags: str) -> None:
    """Refuse questions about the pictures of a model whose pictures show nothing.

    Args:
        flags: that ask such questions, as typed; none is fine.

    Raises:
        UsageError: naming the first of them.
    """
    if flags and found.model.is_synthetic and found.entry is not None:
        raise UsageError(
            f"{flags[0]}: {found.model.name} has random weights, so its pictures show nothing and are not judged; "
            f"leave {flags[0]} out, or measure {found.entry.name}"
        )


def check_size(found: Found, workload: Workload) -> None:
    """Refuse sizes that the model cannot draw.

    Raises:
        WorkloadError: with the nearest size that it can draw.
    """
    multiple = found.entry.size_multiple if found.entry else 8
    largest = found.entry.max_size if found.entry else 8192
    for flag, size in (("--height", workload.height), ("--width", workload.width)):
        nearest_size = min(max(round(size / multiple) * multiple, multiple), largest)
        if size != nearest_size:
            raise WorkloadError(
                f"{flag} {size}: {found.model.name} draws multiples of {multiple} up to {largest} pixels; "
                f"the nearest is {nearest_size}"
            )
    if workload.pixel_steps > MAX_PIXEL_STEPS:
        raise WorkloadError(
            f"{workload.num_pictures} pictures of {workload.width}x{workload.height} at "
            f"{workload.num_inference_steps} steps are {workload.pixel_steps:.1e} pixel steps, more than "
            f"{MAX_PIXEL_STEPS:.0e}; give fewer or smaller pictures"
        )


def default_threads(found: Found) -> int:
    """CPU threads to draw with: the catalogue's, or as many as there are physical cores. Fixed, since it shows in
    the last bits of a picture."""
    if found.entry is not None and found.entry.threads is not None:
        return found.entry.threads
    import psutil

    return psutil.cpu_count(logical=False) or os.cpu_count() or 1
