"""A model with a recipe, drawn in this process.

Names of catalogue models, of repositories and `synthetic:NAME` hold no further colon, so the recipe begins behind the
first. Of a path with colons, the longest beginning that exists is the model.
"""

from __future__ import annotations

import gc
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vivace.architectures import CATALOGUE
from vivace.architectures.entry import few_steps_of
from vivace.errors import RecipeError, UsageError, VivaceError
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.untrusted.files import reason, user_path
from vivace.models.find import SYNTHETIC, find_model
from vivace.proofs.sides.side import (
    SETTINGS,
    Draw,
    DrawingFailure,
    DrawJob,
    DrawnImage,
    ImageSettings,
    OnNote,
    OnRead,
    Side,
    as_png,
)
from vivace.recipes.resolve import resolve

if TYPE_CHECKING:
    from vivace.models.find import LocatedModel
    from vivace.proofs.sides.plan import ProofPlan
    from vivace.runtime.workloads import CheckedRequest


@dataclass(frozen=True)
class RecipeSide(Side):
    """MODEL:RECIPE, e.g. tiny-sd:bf16, org/repo@main:fp8, synthetic:sd15; without a recipe the baseline."""

    text: str
    model: str
    recipe: str

    @staticmethod
    def is_written(text: str) -> bool:
        return True

    @classmethod
    def parse(cls, text: str) -> RecipeSide:
        """Raises RecipeError for a wrong recipe, and UsageError for a recipe without a model."""
        model, recipe = split_model(text)
        if model.lower() not in CATALOGUE and _is_recipe(text):
            raise UsageError(
                f"{text[:200]} is a recipe without a model; give MODEL:RECIPE, e.g. tiny-sd:{text[:100]}"
            )
        resolve(recipe)
        return cls(text, model, recipe)

    @cached_property
    def located(self) -> LocatedModel:  # type: ignore[override]
        return find_model(self.model)

    @property
    def defaults(self) -> dict[str, Any]:
        return self.located.defaults

    @property
    def recipe_settings(self) -> dict[str, Any]:
        from vivace.techniques.distilled import Distilled
        from vivace.techniques.guidance import Guidance
        from vivace.techniques.steps import Steps

        call: dict[str, Any] = {}
        for technique in resolve(self.recipe):
            if isinstance(technique, Steps):
                call["num_inference_steps"] = technique.steps
            elif isinstance(technique, Guidance):
                call["guidance_scale"] = technique.scale
            elif isinstance(technique, Distilled):
                call |= technique.call_with(few_steps_of(self.located.entry))
        return call

    @property
    def identity(self) -> str:
        model = self.located.model
        return f"{model.name}@{model.revision}:{resolve(self.recipe).text}"

    def check(self, plan: ProofPlan) -> None:
        for settings in plan.settings_by_size:
            self._request(plan, settings)

    @contextmanager
    def open(
        self, plan: ProofPlan, is_read: OnRead = lambda: None, on_note: OnNote = lambda text: None
    ) -> Iterator[Draw]:
        import torch

        from vivace.measure.machine import choose_device
        from vivace.models.load import explained
        from vivace.models.quiet import quiet
        from vivace.runtime.workloads import default_threads

        torch.set_num_threads(plan.request.threads or default_threads(self.located))
        with explained(self.located), quiet():
            session: Any = self._request(plan, plan.settings).open(choose_device(plan.request.device))
        is_read()
        for text in session.warnings:
            on_note(text)
        try:
            yield lambda job: self._draw(session, job, plan.settings)
        finally:
            session.close()
            session = None
            gc.collect()  # hooks and pipelines refer to each other, and the other side needs the memory
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _draw(self, session: Any, job: DrawJob, usual: ImageSettings) -> DrawnImage:
        """Draw an image; only what is not as usual is given to the call, as the rest is the recipe's own."""
        from vivace.models.load import explained
        from vivace.models.quiet import quiet
        from vivace.runtime.calls import generators_of, prompts_of
        from vivace.runtime.finite_images import EmptyImageWarning, why_empty

        changed = {name: value for name, value in job.settings.call.items() if usual.call.get(name) != value}
        began = time.monotonic()
        try:
            with explained(self.located, "does not run"), quiet(), warnings.catch_warnings():
                warnings.simplefilter("ignore", EmptyImageWarning)
                call = [(0, job.prompt, job.seed)]
                output = session(**prompts_of(call), **generators_of(call), **changed)
        except VivaceError as error:
            raise DrawingFailure(str(error)) from error
        except (RuntimeError, MemoryError) as error:  # out of memory
            raise DrawingFailure(reason(error)) from error
        seconds = time.monotonic() - began
        notes = tuple(f"it is {reason}" for reason in why_empty(output) if reason)
        how = session.defaults | changed
        how["scheduler"] = type(getattr(session.pipe, "scheduler", None)).__name__
        told = {name: how[name] for name in (*SETTINGS, "scheduler") if how.get(name) is not None}
        return DrawnImage(as_png(output.images[0]), ".png", seconds, notes=notes, settings=told)

    def _request(self, plan: ProofPlan, settings: ImageSettings) -> CheckedRequest:
        from vivace.runtime.workloads import checked_request

        changed = self.recipe_settings
        own = {name: value for name, value in settings.call.items() if name not in changed}
        call = own | plan.request.settings.call
        return checked_request(self.model, self.recipe, prompts=list(plan.prompts), **call)


def split_model(text: str) -> tuple[str, str]:
    """Return the model and the recipe of MODEL:RECIPE. Without a recipe it is the baseline."""
    colons = [place for place, letter in enumerate(text) if letter == ":"]
    if text.lower().startswith(SYNTHETIC) or re.match(r"[A-Za-z]:[\\/]", text):  # a drive of Windows
        colons = colons[1:]
    if not colons or _exists(text):
        return text, BASELINE
    paths = [place for place in colons if "/" in text[:place] and _exists(text[:place])]
    split = paths[-1] if paths else colons[0]
    return text[:split], text[split + 1 :].strip() or BASELINE


def _is_recipe(text: str) -> bool:
    try:
        resolve(text)
    except RecipeError:
        return False
    return True


def _exists(text: str) -> bool:
    try:
        return user_path(text).exists()
    except (OSError, ValueError):
        return False
