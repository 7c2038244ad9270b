"""Open a session: of a model by name, or of an existing diffusers pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vivace.errors import Unsupported, UsageError
from vivace.foundation.spec.workload import Task
from vivace.machinery.families.pipeline_code import call_code
from vivace.machinery.lora.distillations import distillations
from vivace.machinery.technique import (
    ModelFacts,
    Placement,
    Request,
    Target,
    call_of,
    component_of,
)
from vivace.measure.machine import check_works, choose_device, this_machine, torch_type
from vivace.models.find import LocatedModel, find_model
from vivace.models.load import load_tiny_vae, tiny_vae_arguments
from vivace.models.prompts import PROMPT_SETS
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.runtime.calls import call_in_words, example_call, follow_denoiser, signature_defaults
from vivace.runtime.noise import draw_noise_in_fp32
from vivace.runtime.pipelines import notes_on_versions, pipeline_for, stored_effects, with_stored
from vivace.runtime.rollback import put_back_on_error
from vivace.runtime.session import OnTechnique, Session

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def load_session(model: str, recipe: str, device: str, task: Task | None) -> Session:
    """Load a model and apply a recipe; see `vivace.load`."""
    resolved = resolve(recipe)  # errors in it are reported before errors in the model
    return open_session(find_model(model), resolved, choose_device(device), task=task)


def open_session(
    located: LocatedModel,
    recipe: Recipe,
    device: str,
    defaults: dict[str, Any] | None = None,
    prompts: Sequence[str] = (),
    task: Task | None = None,
    controlnet: str | None = None,
) -> Session:
    """Load a resolved model for a task and apply a resolved recipe. For the other arguments see `session_of`."""
    check_works(device)
    pipe = pipeline_for(located, recipe, device, task, controlnet)
    return session_of(pipe, located, recipe, device, defaults, prompts)


def target_of(
    pipe: DiffusionPipeline,
    located: LocatedModel,
    recipe: Recipe,
    device: str,
    defaults: dict[str, Any] | None = None,
    prompts: Sequence[str] = (),
) -> Target:
    """Return the target of a recipe's techniques; the arguments are those of `session_of`."""
    tiny = located.tiny_vae
    return Target(
        where=Placement(
            machine=this_machine(device),
            on_host=recipe.loads_from_host and device != "cpu" and pipe.device.type == "cpu",
        ),
        pipe=pipe,
        model=ModelFacts(
            name=f"{located.model.name}@{located.model.revision}",
            defaults=signature_defaults(pipe) | located.call | located.defaults | (defaults or {}),
            load_tiny_vae=(lambda: load_tiny_vae(tiny)) if tiny is not None else None,
            tiny_vae_arguments=tiny_vae_arguments(located),
            distillations=distillations(located.entry),
            has_random_weights=located.model.is_synthetic,
            stored=stored_effects(located),
        ),
        request=Request(
            prompts=tuple(prompts)
            or (PROMPT_SETS[located.prompt_set] if located.entry is None else located.entry.prompts),
            inputs=example_call(pipe, located.defaults | (defaults or {})),
        ),
    )


def session_of(
    pipe: DiffusionPipeline,
    located: LocatedModel,
    recipe: Recipe,
    device: str,
    defaults: dict[str, Any] | None = None,
    prompts: Sequence[str] = (),
    on_technique: OnTechnique | None = None,
) -> Session:
    """Apply a recipe to a pipeline that was loaded from `located`. It draws the same noise in every dtype.

    Args:
        device: torch's type of device.
        defaults: arguments of the pipeline's call that replace the model's own.
        prompts: the prompts of later calls, for techniques that adapt to them; empty for the catalogue's.
        on_technique: called for each technique, to write a script of the recipe.

    Raises:
        Unsupported, NoEffect: see `vivace.errors`.
    """
    recipe = with_stored(located, recipe)
    target = target_of(pipe, located, recipe, device, defaults, prompts)
    session = Session(pipe, recipe, target, on_technique)
    session.warnings[:0] = (*located.notes, *notes_on_versions(located))
    follow_denoiser(pipe, device)
    draw_noise_in_fp32(pipe)
    return session


def apply_recipe(pipe: DiffusionPipeline, recipe: str, prompts: Sequence[str]) -> Session:
    """Apply a recipe to a pipeline in place; see `vivace.apply`."""
    resolved = resolve(recipe)
    inner = _computing(pipe)
    target = Target(
        Placement(this_machine(torch_type(getattr(inner, "device", "cpu")))),
        inner,
        ModelFacts(defaults=signature_defaults(pipe)),
        Request(prompts=tuple(prompts)),
    )
    try:
        call_code(inner)
    except Unsupported as error:
        # Techniques that read it say so now, before an earlier one has changed weights.
        for technique in resolved:
            try:
                technique.unsupported(target)
            except Unsupported:
                raise Unsupported(f"{technique.name}: {error}") from None
    with put_back_on_error(inner):
        session = Session(pipe, resolved, target)
    if not call_of(pipe).is_known and not signature_defaults(pipe):
        session.warnings.append(
            f"{call_in_words(pipe)} neither steps nor guidance: they are what it makes of them"
        )
    return session


def _computing(pipe: Any) -> Any:
    """Return the pipeline that computes: the given one, or the one inside a wrapper.

    Raises:
        UsageError: it is no pipeline.
    """
    inner = call_of(pipe).pipe if callable(pipe) and not isinstance(pipe, type) else None
    if component_of(inner, "denoiser") is None:
        others = (
            [each for each in vars(inner).values() if component_of(each, "denoiser") is not None]
            if inner
            else []
        )
        inner = others[0] if len(others) == 1 else inner
    if not hasattr(type(inner), "components") and component_of(inner, "denoiser") is None:
        raise UsageError(
            f"vivace.apply takes a diffusers pipeline, or an object that holds one, got {pipe!r:.60}; "
            "vivace.load(model, recipe) takes the name of a model"
        )
    return inner
