"""A request for images of a model with a recipe: checked before anything is loaded, then the arguments of its calls.

`generate`, `warm`, `export`, `calibrate`, `profile` and `prove` begin here. A benchmark's comparison of several recipes
is checked by the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

from vivace.errors import UsageError
from vivace.foundation.spec.study import CallKeywords, Study
from vivace.foundation.spec.workload import Workload
from vivace.models.find import LocatedModel, find_model, obtain
from vivace.models.sources import SourceImages, image_arguments
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.runtime.calls import Call, generators_of, prompts_of
from vivace.runtime.opening import open_session
from vivace.runtime.session import Session
from vivace.runtime.workloads import workload_and_images


@dataclass(frozen=True)
class CheckedRequest:
    """A model, a recipe and the images to draw. Nothing is loaded yet.

    Attributes:
        sources: that the images start from; None for text.
    """

    located: LocatedModel
    recipe: Recipe
    workload: Workload
    sources: SourceImages | None = None

    def open(self, device: str) -> Session:
        """Load the model on torch's type of device, and apply the recipe.

        Raises:
            Unsupported, NoEffect: the recipe does not work here.
        """
        workload = self.workload
        return open_session(
            self.located,
            self.recipe,
            device,
            workload.call,
            workload.prompts,
            workload.task,
            workload.controlnet,
        )

    def arguments(self, call: Call) -> dict[str, Any]:
        """Return the arguments of a call besides the session's defaults: prompts, generators and source images."""
        images = {} if self.sources is None else self.sources.by_sha
        indices = [index for index, _, _ in call]
        sources = image_arguments(self.located.pipeline, self.workload, indices, images)
        return prompts_of(call) | generators_of(call) | sources


def checked_request(model: str, recipe: str, **fields: Unpack[CallKeywords]) -> CheckedRequest:
    """Check a request for images as far as possible before a model is loaded, and return it.

    Args:
        model: what `vivace.load` takes.
        fields: as for `vivace.bench`; one batch size, a number.

    Raises:
        UnknownModel, UnusableModel, Unsupported, RecipeError, WorkloadError, UsageError: see `vivace.errors`.
    """
    request = Study.of(model, [recipe], quality=False, rivals=False, **fields).workload
    batch, *more = request.batches
    if more or batch == "max":
        raise UsageError("images are drawn at one batch size; give a number")
    resolved = resolve(recipe).pinned()
    located = find_model(model)
    workload, images = workload_and_images(located, request, batch)
    return CheckedRequest(obtain(located), resolved, workload, images)
