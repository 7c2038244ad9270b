"""The structure of diffusers' pipelines: which attribute is which component, in one place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import torch

Component = Literal["denoiser", "text_encoder", "text_encoder_2", "text_encoder_3", "vae"]
COMPONENTS: tuple[Component, ...] = get_args(Component)
TEXT_ENCODERS: tuple[Component, ...] = ("text_encoder", "text_encoder_2", "text_encoder_3")
DENOISERS = ("unet", "transformer")
"""Names that pipelines give their denoiser. A recipe may use them as targets too."""


def attribute_of(pipe: Any, component: Component) -> str:
    """Return the pipeline's own name for a component: "unet" or "transformer" for its denoiser."""
    if component != "denoiser":
        return component
    return next((name for name in DENOISERS if getattr(pipe, name, None) is not None), DENOISERS[-1])


def component_of(pipe: Any, component: Component) -> Any:
    return getattr(pipe, attribute_of(pipe, component), None)


def second_denoisers(pipe: Any) -> list[Any]:
    """Return the pipeline's further modules of its denoiser's class, such as one that guides."""
    denoiser = component_of(pipe, "denoiser")
    parts = getattr(pipe, "components", {}).values()
    return [part for part in parts if type(part) is type(denoiser) and part is not denoiser]


def working_part(component: Component, module: torch.nn.Module) -> Any:
    """Return the module that a text-to-image pipeline calls: a VAE's decoder (never its `forward`), else the whole."""
    return module.decoder if component == "vae" else module


@dataclass(frozen=True)
class PipelineCall:
    """A pipeline's call, followed through what only passes its arguments on (`function`), with the `parameters` of all
    on the way."""

    pipe: Any
    function: Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]

    @property
    def is_known(self) -> bool:
        """Whether the parameters are all that the call uses."""
        return not _passes_on(self.parameters) or _is_of_diffusers(self.function, self.parameters)


def call_of(pipe: Any) -> PipelineCall:
    """Return a pipeline's call, followed through `super().__call__`, decorators, methods and pipelines inside."""
    return _followed(pipe, type(pipe).__call__, frozenset())


def call_parameters(pipe: Any) -> Mapping[str, inspect.Parameter]:
    return call_of(pipe).parameters


def _followed(pipe: Any, function: Callable[..., Any], on_the_way: frozenset[Any]) -> PipelineCall:
    own = _parameters(function)
    if _passes_on(own) and not _is_of_diffusers(function, own):
        for owner, following in _called_in(pipe, function):
            if following in on_the_way:
                continue
            inner = _followed(owner, following, on_the_way | {function})
            if {"prompt", "num_inference_steps"} <= inner.parameters.keys():
                named = {name: each for name, each in own.items() if each.kind not in _VARIADIC}
                others = {name: each for name, each in inner.parameters.items() if name not in named}
                return PipelineCall(inner.pipe, inner.function, MappingProxyType(named | others))
    return PipelineCall(pipe, function, own)


def _is_of_diffusers(function: Any, parameters: Mapping[str, inspect.Parameter]) -> bool:
    return function.__module__.startswith("diffusers.") and "num_inference_steps" in parameters


def _called_in(pipe: Any, function: Callable[..., Any]) -> Iterator[tuple[Any, Callable[..., Any]]]:
    plain = inspect.unwrap(function)
    if not isinstance(plain, FunctionType):
        return
    for cell in plain.__closure__ or ():
        if isinstance(cell.cell_contents, FunctionType):  # a decorator without functools.wraps
            yield pipe, cell.cell_contents
    names = plain.__code__.co_names
    if "__call__" in names:
        kinds = list(type(pipe).__mro__)
        defining = next((i for i, kind in enumerate(kinds) if vars(kind).get("__call__") is function), -1)
        yield from (
            (pipe, vars(kind)["__call__"]) for kind in kinds[defining + 1 :] if "__call__" in vars(kind)
        )
    for name in names:
        inside = getattr(pipe, "__dict__", {}).get(name)
        kind = type(inside)
        if callable(inside) and isinstance(kind.__call__, FunctionType):
            yield inside, kind.__call__
        elif isinstance(method := getattr(type(pipe), name, None), FunctionType) and method is not function:
            yield pipe, method


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _passes_on(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


@functools.cache  # every call needs them, several times, before the GPU has work
def _parameters(method: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    every = list(inspect.signature(method).parameters.values())
    skipped = 1 if every and every[0].kind not in _VARIADIC else 0
    return MappingProxyType({parameter.name: parameter for parameter in every[skipped:]})


def weights_dtype(module: Any) -> torch.dtype | None:
    """Return the dtype of the first floating-point weight of 16 bits or more; diffusers' searches all layers for
    hooks."""
    weights = module.parameters() if hasattr(module, "parameters") else ()
    return next((w.dtype for w in weights if w.is_floating_point() and w.dtype.itemsize > 1), None)


def ignores_guidance_scale(pipe: Any) -> bool:
    """Return whether a guidance scale changes nothing: the model lacks the input, or was distilled without one."""
    scale = call_parameters(pipe).get("guidance_scale")
    config = getattr(getattr(pipe, "transformer", None), "config", {})
    lacks_input = scale is not None and scale.default is None and config.get("guidance_embeds") is False
    return lacks_input or bool(getattr(pipe, "config", {}).get("is_distilled"))


def without_clashes(pipe: Any, call: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments, with None for arguments whose default the pipeline would refuse together with them.

    Sana-Sprint's timestep in the middle of two for any other number of steps; Sana's negative prompt beside negative
    embeddings; Ideogram 4's schedule of guidance beside a scale.
    """
    parameters = call_parameters(pipe)
    clashing = {
        "intermediate_timesteps": call.get("num_inference_steps", 2) != 2,
        "negative_prompt": call.get("negative_prompt_embeds") is not None,
        "guidance_schedule": call.get("guidance_scale") is not None,
    }
    absent = [
        name
        for name, clashes in clashing.items()
        if clashes and name in parameters and name not in call and parameters[name].default is not None
    ]
    return call | dict.fromkeys(absent)


def is_cast_in_call(pipe: Any) -> bool:
    """Return whether each call casts the VAE to fp32 and back, as SDXL's do where it overflows in fp16."""
    import torch

    vae = getattr(pipe, "vae", None)
    return bool(
        vae is not None
        and hasattr(type(pipe), "upcast_vae")
        and vae.config.get("force_upcast")
        and vae.dtype == torch.float16
    )
