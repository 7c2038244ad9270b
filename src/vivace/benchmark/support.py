"""Which techniques cannot work on a machine and a model, asked before anything is loaded or timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vivace.benchmark.launcher import Launcher, ask
from vivace.benchmark.requests import SupportRequest
from vivace.contract import COMPONENTS, Component, ModelFacts, Placement, Request, Target
from vivace.errors import VivaceError
from vivace.memory.predict import built_for
from vivace.memory.weightless import Weightless, find_weightless
from vivace.models.catalogue import CATALOGUE
from vivace.models.find import SYNTHETIC
from vivace.models.lora import distillations
from vivace.recipes.resolve import resolve
from vivace.spec.workload import Task

_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Support:
    """What a machine and a model allow.

    Attributes:
        reasons: why recipes cannot work, by recipe; those that may work are not in it.
        components: that the model has; None if it cannot be built without its weights.
    """

    reasons: dict[str, str]
    components: frozenset[Component] | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "reasons": self.reasons,
            "components": None if self.components is None else [*self.components],
        }


def ask_support(
    launcher: Launcher,
    model: str,
    recipes: Sequence[str],
    device: str,
    task: Task | None = None,
    batch: int | None = None,
) -> Support:
    """Return which recipes cannot work here, and what components the model has. A worker answers.

    Args:
        task: what is generated from; None for what the model is published for.
        batch: images per call; None if unknown.
    """
    request = SupportRequest(model=model, recipes=tuple(recipes), device=device, task=task, batch=batch)
    found = ask(launcher, request, _TIMEOUT_S)
    components = found["components"]
    return Support(found["reasons"], None if components is None else frozenset(components))


def support_of(
    model: str, recipes: Sequence[str], device: str, task: Task | None = None, batch: int | None = None
) -> Support:
    """Return what `ask_support` asks. Runs in the worker.

    Techniques judge the machine and a pipeline on the meta device. Of a model that cannot be built without its weights
    they judge the machine alone.
    """
    from vivace.measure.machine import choose_device, this_machine

    placement = Placement(this_machine(choose_device(device)))
    pipe, facts = pipeline_without_weights(model, task)
    target = Target(placement, pipe, facts, Request(prompts=("a red circle",), batch=batch))
    reasons: dict[str, str] = {}
    for text in recipes:
        for technique in resolve(text):
            reason = technique.unsupported(target)
            if reason is not None:
                reasons[text] = reason
                break
    return Support(reasons, None if pipe is None else frozenset(target.modules(COMPONENTS)))


def pipeline_without_weights(model: str, task: Task | None) -> tuple[object | None, ModelFacts]:
    """Return the pipeline on the meta device, with what is known of it; no pipeline if it cannot be built."""
    is_synthetic = model.startswith(SYNTHETIC)
    try:
        found: Weightless = find_weightless(model)
        pipe = built_for(found, task)
    except VivaceError:
        return None, ModelFacts(has_random_weights=is_synthetic)
    return pipe, ModelFacts(
        name=model,
        defaults=found.defaults,
        load_tiny_vae=found.build_tiny_vae,
        distillations=distillations(CATALOGUE.get(found.name.removeprefix(SYNTHETIC))),
        has_random_weights=is_synthetic,
    )
