"""Whether a model with its recipe fits the memory of a GPU, or of a machine without one, asked before it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace.errors import Unsupported, VivaceError
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.measure.surroundings import machine_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vivace.foundation.spec.workload import Task
    from vivace.recipes.recipe import Recipe

_GB = 1e9


def memory_of(device: str) -> int | None:
    """Return the bytes of memory of a device: of the first GPU, or of this machine or container; None if unknown."""
    import torch

    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return int(machine_bytes()) if device == "cpu" else None


def check_fits(
    name: str,
    recipe: Recipe,
    sizes: Sequence[tuple[int, int]],
    task: Task | None,
    num_bytes: int,
    place: str = "this GPU",
) -> None:
    """Raise Unsupported if a model with a recipe needs more memory than a device has, as `vivace plan` predicts.

    Predicting takes seconds, and is left out for a model of the catalogue that fits as it is published, even if all
    that it needs grew with the square of the pixels. What cannot be predicted is loaded.

    Args:
        sizes: that are warmed; empty for the model's own.
        num_bytes: of the device.
        place: the device in words.
    """
    from vivace.runtime.memory.fit import RESERVE_BYTES, fits
    from vivace.runtime.memory.remembered import footprints, predicted
    from vivace.runtime.memory.weightless import find_weightless

    width, height = max(sizes, key=lambda size: size[0] * size[1], default=(None, None))
    published = footprints().get(name.removeprefix("synthetic:"))
    larger = 1.0 if published is None else (width or 0) * (height or 0) / (published.width * published.height)
    if published is not None and fits(published, num_bytes / max(1.0, larger) ** 2):
        return
    if larger > 1:
        published = None  # it says nothing of larger images
    if published is not None and recipe.text == BASELINE:
        prediction = published
    else:
        try:
            prediction = predicted(find_weightless(name), recipe, height=height, width=width, task=task)
        except VivaceError:
            return
    if not fits(prediction, num_bytes):
        needed = (prediction.needed_bytes + RESERVE_BYTES) / _GB
        raise Unsupported(
            f"{name} with {recipe.text} needs {needed:.1f} GB at {prediction.width}x{prediction.height}, and {place} "
            f"has {num_bytes / _GB:.1f} GB; `vivace plan {name} --card {num_bytes / _GB:.0f}` says what fits"
        )
