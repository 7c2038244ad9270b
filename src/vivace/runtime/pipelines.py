"""The pipeline that a recipe is applied to: of a published model, or of a saved folder with changed weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vivace.errors import RecipeError, Unsupported, UnusableModel
from vivace.foundation.spec.workload import Task
from vivace.foundation.untrusted.files import is_below
from vivace.machinery.lora.read_lora import merge
from vivace.machinery.technique import COMPONENTS, Effect, Placement, Target, Technique
from vivace.measure.machine import this_machine
from vivace.measure.this_environment import library_versions
from vivace.models.find import LocatedModel, obtain
from vivace.models.load import load_pipeline
from vivace.models.saved_folder import NAME
from vivace.models.tasks import check_installed, for_task, own_task, pipeline_of
from vivace.recipes.recipe import Recipe
from vivace.runtime.saved import Rebuild, read_pipeline
from vivace.techniques.lora import Lora

LORAS = "loras"
"""Folder of a saved one with the LoRAs that are read when it is loaded."""
_LIBRARIES = ("torch", "torchao", "diffusers", "transformers")


def pipeline_for(
    located: LocatedModel, recipe: Recipe, device: str, task: Task | None, controlnet: str | None
) -> Any:
    """Load the pipeline that a recipe is applied to."""
    if located.make is not None:
        return located.make()
    if located.saved is None:
        on_host = recipe.loads_from_host
        return load_pipeline(
            located, device, keep_on_host=on_host, task=task, controlnet=controlnet, merge=merge
        )
    kind = pipeline_of(located.pipeline, task or own_task(located.pipeline), located.model.name)
    check_installed(located.pipeline, located.model.name)
    whole = with_stored(located, recipe)
    stored = stored_effects(located)
    _check_device(located, whole, device)
    moves = any(technique.facts.loads_from_host for technique in whole if technique.text not in stored)

    pipe = read_pipeline(obtain(located), _rebuild(located, whole), "cpu" if moves else device)
    return pipe if kind == located.pipeline else for_task(pipe, kind, controlnet)


def weightless_pipeline(located: LocatedModel) -> Any:
    """Return the pipeline of a saved folder with its weights on the meta device: their shapes and dtypes, no values."""
    return read_pipeline(located, _rebuild(located, with_stored(located, Recipe())), "meta")


def _rebuild(located: LocatedModel, recipe: Recipe) -> Rebuild:
    stored = stored_effects(located)

    def rebuild(skeletons: Any) -> None:
        target = Target(Placement(this_machine("cpu")), skeletons)
        for technique in recipe:
            if technique.text in stored:
                technique.rebuild(target, stored[technique.text].changed)

    return rebuild


def with_stored(located: LocatedModel, recipe: Recipe) -> Recipe:
    """Return a recipe combined with the stored one of a saved folder; unchanged for other models."""
    if located.saved is None:
        return recipe
    try:
        own = Recipe.from_spec(located.saved.recipe)
    except RecipeError as error:
        assert located.folder is not None
        raise UnusableModel(
            f"{located.folder / NAME}: the key 'recipe' cannot be applied: {error.problem}; save the model again"
        ) from None
    own = Recipe(tuple(_in_folder(technique, located.folder) for technique in own))
    added = [technique for technique in recipe if technique not in own.techniques]
    try:
        whole = own.with_(*added) if added else own
    except RecipeError as error:
        raise Unsupported(
            f"{located.model.name} has its recipe already, {own.text}: {error.problem}; save "
            f"{located.saved.model.name} with the other one"
        ) from None
    stored = stored_effects(located)
    if unknown := [
        text
        for text in stored
        if text not in {technique.text for technique in own if technique.facts.is_stored}
    ]:
        raise UnusableModel(
            f"{located.model.name}: {NAME} names {unknown[0][:80]!r} under the key 'stored', which no recipe stores"
        )
    for technique in whole:
        if technique.text not in stored and (later := precedes(technique, whole, set(stored))) is not None:
            raise Unsupported(
                f"{technique.text} changes weights before {later.text}, whose result {located.model.name} holds; save "
                f"{located.saved.model.name} with both"
            )
    return whole


def _in_folder(technique: Technique, folder: Path | None) -> Technique:
    """Return a saved technique with the path of its file, if that was saved with it."""
    if folder is None or not isinstance(technique, Lora) or not technique.path.startswith(f"{LORAS}/"):
        return technique
    file = folder / technique.path
    return technique.model_copy(update={"path": str(file)}) if is_below(file, folder) else technique


def precedes(technique: Technique, recipe: Recipe, stored: set[str]) -> Technique | None:
    """Return a stored technique that is applied after this one and shares a component with it; None without one."""
    after = recipe.techniques[recipe.techniques.index(technique) + 1 :]
    where = set(technique.targets or COMPONENTS)
    return next((t for t in after if t.text in stored and where & set(t.targets or COMPONENTS)), None)


def stored_effects(located: LocatedModel) -> dict[str, Effect]:
    """Return the techniques' effects on the weights of a saved folder, by their text; empty for other models."""
    if located.saved is None:
        return {}
    return {
        technique.text: Effect(
            changed=dict(technique.changed),
            notes=technique.notes,
            call=dict(technique.defaults),
            evidence=lambda facts=technique.evidence: facts,  # type: ignore[misc]
        )
        for technique in located.saved.stored
    }


def notes_on_versions(located: LocatedModel) -> list[str]:
    """Return the libraries whose version has changed since a folder was saved: images may differ in the last bits."""
    if located.saved is None:
        return []
    then, now = located.saved.environment.libraries, library_versions()
    other = [
        f"{name} {then.get(name)}, here {now.get(name)}"
        for name in _LIBRARIES
        if then.get(name) != now.get(name)
    ]
    return [f"saved with {', '.join(other)}: images may differ in their last bits"] if other else []


def _check_device(located: LocatedModel, recipe: Recipe, device: str) -> None:
    """Raise Unsupported if a saved folder's weights are of another kind of device, or this one cannot compute them."""
    assert located.saved is not None
    then = located.saved.environment.device
    if then != device:
        raise Unsupported(
            f"{located.model.name} was saved for {then}, whose precision and layout of weights are its own; give "
            f"--device {then}, or save {located.saved.model.name} with --device {device}"
        )
    stored = stored_effects(located)
    machine = Target.of_machine(this_machine(device))
    for technique in recipe:
        if technique.text in stored and (reason := technique.unsupported(machine)) is not None:
            raise Unsupported(f"{technique.name}: {reason}")
