"""Whether a model with its recipe fits a GPU's memory, asked before it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace.errors import Unsupported, VivaceError
from vivace.spec.recipe_syntax import BASELINE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vivace.recipes.recipe import Recipe
    from vivace.spec.workload import Task

_GB = 1e9


def check_fits(
    name: str, recipe: Recipe, sizes: Sequence[tuple[int, int]], task: Task | None, gpu_bytes: int
) -> None:
    """Raise Unsupported if a model with a recipe needs more memory than a GPU has, as `vivace plan` predicts.

    Predicting takes seconds, and is left out for a model of the catalogue that fits as it is published. What cannot be
    predicted is loaded.

    Args:
        sizes: that are warmed; empty for the model's own.
        gpu_bytes: of the GPU.
    """
    from vivace.memory.fit import RESERVE_BYTES, fits
    from vivace.memory.footprints import footprints
    from vivace.memory.remembered import predicted
    from vivace.memory.weightless import find_weightless

    width, height = max(sizes, key=lambda size: size[0] * size[1], default=(None, None))
    published = footprints().get(name.removeprefix("synthetic:"))
    if published is not None and (width or 0) * (height or 0) > published.width * published.height:
        published = None  # it says nothing of larger images
    if published is not None and fits(published, gpu_bytes):
        return
    if published is not None and recipe.text == BASELINE:
        prediction = published
    else:
        try:
            prediction = predicted(find_weightless(name), recipe, height=height, width=width, task=task)
        except VivaceError:
            return
    if not fits(prediction, gpu_bytes):
        needed = (prediction.needed_bytes + RESERVE_BYTES) / _GB
        raise Unsupported(
            f"{name} with {recipe.text} needs {needed:.1f} GB at {prediction.width}x{prediction.height}, and this GPU "
            f"has {gpu_bytes / _GB:.1f} GB; `vivace plan {name} --card {gpu_bytes / _GB:.0f}` says what fits"
        )
