"""Find out which techniques cannot work on a machine and a model, before anything is loaded or timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vivace.architectures import CATALOGUE
from vivace.architectures.entry import few_steps_of
from vivace.benchmark.rounds.worker_requests import SupportRequest, ask
from vivace.errors import NoEffect, Unpredictable, Unsupported, VivaceError
from vivace.foundation.processes.launcher import Launcher
from vivace.foundation.spec.workload import Task
from vivace.machinery.technique import (
    COMPONENTS,
    Component,
    Effect,
    ModelFacts,
    Placement,
    Request,
    Target,
    Technique,
)
from vivace.models.find import SYNTHETIC
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import built_for
from vivace.runtime.memory.weightless import Weightless, find_weightless
from vivace.runtime.session import OnTechnique, Session

_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Support:
    """What a machine and a model allow.

    Attributes:
        reasons: why recipes cannot work, by recipe; those that may work are not in it.
        components: that the model has; None if it cannot be built without its weights.
        by_model: recipes that the machine allows but the unchanged model does not; with other techniques they may work.
        idle: the techniques of a recipe that change nothing after those before them, and why, by recipe and technique.
    """

    reasons: dict[str, str]
    components: frozenset[Component] | None = None
    by_model: frozenset[str] = frozenset()
    idle: dict[str, dict[str, str]] = field(default_factory=dict)

    def refusals(
        self, recipes: Sequence[Recipe], keeps: Callable[[Technique], bool] = lambda _: False
    ) -> dict[str, str]:
        """Return why recipes need no trial: they cannot work, or a technique that nobody asked for changes nothing."""
        reasons = dict(self.reasons)
        for recipe in recipes:
            reasons_of = self.idle.get(recipe.text, {})
            for technique in recipe:
                if technique.text in reasons_of and not keeps(technique):
                    reasons[recipe.text] = (
                        f"{technique.text} changes nothing there: {reasons_of[technique.text]}"
                    )
        return reasons

    def to_json(self) -> dict[str, Any]:
        return {
            "reasons": self.reasons,
            "components": None if self.components is None else [*self.components],
            "by_model": sorted(self.by_model),
            "idle": self.idle,
        }


def ask_support(
    launcher: Launcher,
    model: str,
    recipes: Sequence[str],
    device: str,
    task: Task | None = None,
    batch: int | None = None,
) -> Support:
    """Ask a worker which recipes cannot work here, and what components the model has."""
    request = SupportRequest(model=model, recipes=tuple(recipes), device=device, task=task, batch=batch)
    answer = ask(launcher, request, _TIMEOUT_S)
    components = answer["components"]
    components_ = None if components is None else frozenset(components)
    return Support(answer["reasons"], components_, frozenset(answer["by_model"]), answer["idle"])


def support_of(
    model: str, recipes: Sequence[str], device: str, task: Task | None = None, batch: int | None = None
) -> Support:
    """Answer `ask_support`. Runs in the worker. In a recipe of several, each technique checks the pipeline, on the meta
    device, as those before it have left it."""
    from vivace.measure.machine import choose_device, this_machine

    placement = Placement(this_machine(choose_device(device)))
    pipe, facts = pipeline_without_weights(model, task, placement.machine.device)
    request = Request(prompts=("a red circle",), batch=batch)
    target = Target(placement, pipe, facts, request)
    reasons: dict[str, str] = {}
    by_model: set[str] = set()
    idle: dict[str, dict[str, str]] = {}
    for text in recipes:
        refused = why_refused(
            resolve(text), target, lambda: pipeline_without_weights(model, task, placement.machine.device)
        )
        if refused is not None and refused.idle:
            idle[text] = refused.idle
        elif refused is not None:
            reasons[text] = refused.reason
            if refused.by_model:
                by_model.add(text)
    components = None if pipe is None else frozenset(target.modules(COMPONENTS))
    return Support(reasons, components, frozenset(by_model), idle)


@dataclass(frozen=True)
class Refused:
    """Why a recipe cannot work, and whether the model is the reason instead of the machine.

    idle: if it works, techniques that change nothing after those before them, and why; it is as good without these.
    """

    reason: str
    by_model: bool
    idle: dict[str, str] = field(default_factory=dict)


def why_refused(
    recipe: Recipe, target: Target, build: Callable[[], tuple[Any, ModelFacts]]
) -> Refused | None:
    """Return why a recipe cannot work on a machine and a model on the meta device; None if it may. `build` returns the
    same pipeline again, to apply a recipe of several techniques to."""
    machine = replace(target, pipe=None)
    for technique in recipe:
        if (reason := technique.unsupported(machine)) is not None:
            return Refused(reason, by_model=False)
    if target.pipe is None:
        return None
    if len(recipe.techniques) == 1:
        reason = recipe.techniques[0].unsupported(target)
        return None if reason is None else Refused(reason, by_model=True)
    pipe, facts = build()
    try:
        idle = _Rehearsal(
            pipe, recipe, replace(target, pipe=pipe, model=replace(facts, has_weights=False))
        ).idle
    except (Unsupported, NoEffect) as error:
        return Refused(str(error), by_model=True)
    except (
        RuntimeError
    ):  # from PyTorch, where values are needed: the round will show it, and its crash ends no search
        return None
    if not idle:
        return None
    return Refused("; ".join(f"{text} changes nothing: {why}" for text, why in idle.items()), True, idle)


class _Rehearsal(Session):
    """A recipe applied to a pipeline on the meta device, also where its memory cannot be predicted."""

    def _apply_technique(
        self, technique: Technique, target: Target, on_technique: OnTechnique | None, *, alone: bool
    ) -> Effect | None:
        try:
            return super()._apply_technique(technique, target, on_technique, alone=alone)
        except Unpredictable:  # it has judged the pipeline before
            return Effect()


def pipeline_without_weights(model: str, task: Task | None, device: str) -> tuple[object | None, ModelFacts]:
    """Return the pipeline on the meta device with its facts; no pipeline if it cannot be built."""
    is_synthetic = model.startswith(SYNTHETIC)
    try:
        weightless: Weightless = find_weightless(model)
        pipe = built_for(weightless, task, device)
    except VivaceError:
        return None, ModelFacts(has_random_weights=is_synthetic)
    return pipe, ModelFacts(
        name=model,
        defaults=weightless.defaults,
        load_tiny_vae=weightless.build_tiny_vae,
        distillations=few_steps_of(CATALOGUE.get(weightless.name.removeprefix(SYNTHETIC))),
        has_random_weights=is_synthetic,
    )
