"""Open a session: of a model by name, or of an existing diffusers pipeline."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from vivace.architectures.entry import StoredPart, few_steps_of
from vivace.errors import Unsupported, UsageError, VivaceError
from vivace.foundation.spec.workload import Task
from vivace.machinery.technique import (
    ModelFacts,
    Placement,
    Request,
    Target,
    call_of,
    component_of,
)
from vivace.machinery.technique.pipeline_code import call_code
from vivace.machinery.technique.traits import traits_by_techniques, with_traits
from vivace.measure.machine import check_works, choose_device, this_machine, torch_type
from vivace.models.find import LocatedModel, find_model
from vivace.models.load import load_tiny_vae, tiny_vae_arguments
from vivace.models.prompts import NUM_DEFAULT, PROMPT_SETS
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.runtime.calls import call_in_words, example_call, follow_denoiser, signature_defaults
from vivace.runtime.noise import draw_noise_in_fp32
from vivace.runtime.pipelines import notes_on_versions, pipeline_for, stored_effects, with_stored
from vivace.runtime.session import OnTechnique, Session

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


_DICTIONARIES = (dict, OrderedDict)
_PLAIN = frozenset({*_DICTIONARIES, bool, float, int, str, tuple, type(None)})
"""Types of most attributes: asking for these first takes a third of the time."""
_Copied = dict[str, tuple[Any, dict[Any, Any] | None]]
"""Attributes by name, with the content of those that are dictionaries."""


# Techniques change attributes, hooks and layers, and weights. References to weights are weak, so that weights replaced
# by a technique are freed at once, as without a snapshot; except to tensor subclasses, which PyTorch cannot move while
# there is a weak reference to them. Hence only a pipeline whose weights are all untouched can be restored; otherwise
# nothing is.
class Snapshot:
    """The attributes of a pipeline, its scheduler and its modules."""

    def __init__(self, pipe: Any) -> None:
        import torch

        parts = [part for part in getattr(pipe, "components", {}).values() if part is not None]
        networks = [part for part in parts if isinstance(part, torch.nn.Module)]
        self._scheduler = getattr(pipe, "scheduler", None)
        self._kind = type(self._scheduler)
        self._traits = [(part, traits_by_techniques(part)) for part in networks]
        owners = (pipe, self._scheduler)
        self._owners = [
            (owner, _copied(vars(owner), lambda value: value)) for owner in owners if owner is not None
        ]
        self._modules = [
            (weakref.ref(module), _copied(vars(module), _weak), _contents(vars(module)))
            for part in networks
            for module in part.modules()
        ]

    def restore(self) -> bool:
        """Put everything back, and return whether that was possible. If not, nothing is changed."""
        held = list(self._owners)  # none may be freed while others are put back
        for reference, attributes, contents in self._modules:
            module = reference()
            now = {
                name: (_strong(value), None if inside is None else {k: _strong(v) for k, v in inside.items()})
                for name, (value, inside) in attributes.items()
            }
            values = [value for each in now.values() for value in (each[0], *(each[1] or {}).values())]
            if (
                module is None
                or any(value is _FREED for value in values)
                or contents != _contents({name: inside for name, (_, inside) in now.items()})
            ):
                return False
            held.append((module, now))
        for owner, attributes in held:
            vars(owner).clear()
            for name, (value, inside) in attributes.items():
                vars(owner)[name] = value
                if (
                    inside is not None
                ):  # the dictionary stays the same object, since hooks are removed from it
                    value.clear()
                    value.update(inside)
        if self._scheduler is not None:
            self._scheduler.__class__ = self._kind
        for part, traits in self._traits:
            with_traits(part, traits)
        return True


_FREED = object()


def _copied(attributes: dict[str, Any], reference: Callable[[Any], Any]) -> _Copied:
    return {
        name: (
            reference(value),
            None
            if type(value) not in _DICTIONARIES
            else {key: reference(item) for key, item in value.items()}
            if value  # most are hooks that nobody has registered
            else {},
        )
        for name, value in attributes.items()
    }


def _contents(attributes: Mapping[str, Any]) -> dict[str, Hashable]:
    return {
        name: _content(tensor)
        for part in ("_parameters", "_buffers")
        for name, tensor in attributes[part].items()
        if tensor is not None
    }


def _content(tensor: Any) -> Hashable:
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type == "meta":
        return id(tensor), tensor.dtype
    return id(tensor), tensor.dtype, tensor.device, tensor.data_ptr(), tensor.stride(), tensor._version


def _weak(value: Any) -> Any:
    is_freed = type(value) not in _PLAIN and isinstance(value, _freed_types())
    return weakref.ref(value) if is_freed and not hasattr(value, "__tensor_flatten__") else value


def _strong(value: Any) -> Any:
    if not isinstance(value, weakref.ref):
        return value
    there = value()
    return _FREED if there is None else there


@cache
def _freed_types() -> tuple[type, ...]:
    import torch

    return torch.Tensor, torch.nn.Module


@contextmanager
def put_back_on_error(pipe: Any) -> Iterator[None]:
    """Restore a pipeline if the block raises an error, or note in the error that this failed."""
    before = Snapshot(pipe)
    try:
        yield
    except BaseException as error:
        if not before.restore():
            note = "weights of the pipeline have been changed before this, so load it again"
            if isinstance(error, VivaceError):
                error.args = (f"{error}; {note}", *error.args[1:])
            else:
                error.add_note(note)
        raise


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
            name=located.model.identity,
            defaults=signature_defaults(pipe) | located.call | located.defaults | (defaults or {}),
            load_tiny_vae=(lambda: load_tiny_vae(tiny)) if tiny is not None else None,
            tiny_vae_arguments=tiny_vae_arguments(located),
            tiny_vae_class=(isinstance(tiny, StoredPart) and tiny.class_name) or "",
            distillations=few_steps_of(located.entry),
            has_random_weights=located.model.is_synthetic,
            stored=stored_effects(located),
        ),
        request=Request(
            prompts=tuple(prompts)
            or PROMPT_SETS[located.prompt_set][: None if located.entry is None else NUM_DEFAULT],
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
    place = getattr(inner, "device", "cpu")
    if str(place) == "meta":  # other libraries offload it
        place = inner._execution_device
    target = Target(
        Placement(this_machine(torch_type(place))),
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
    """Return the pipeline that computes: the given one, or the one inside a wrapper."""
    inner = call_of(pipe).pipe if callable(pipe) and not isinstance(pipe, type) else None
    if component_of(inner, "denoiser") is None:
        held = getattr(inner, "__dict__", {}).values()
        others = [each for each in held if component_of(each, "denoiser") is not None]
        inner = others[0] if len(others) == 1 else inner
    if not hasattr(type(inner), "components") and component_of(inner, "denoiser") is None:
        raise UsageError(
            f"vivace.apply takes a diffusers pipeline, or an object that holds one, got {pipe!r:.60}; "
            "vivace.load(model, recipe) takes the name of a model"
        )
    return inner
