"""The structure of diffusers' pipelines: which attribute is which component, in one place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
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
    """Return the pipeline's `torch.nn.Module` for a component, None if it has none."""
    return getattr(pipe, attribute_of(pipe, component), None)


def working_part(component: Component, module: torch.nn.Module) -> Any:
    """Return the module that a text-to-image pipeline calls: a VAE's decoder (never its `forward`), else the whole."""
    return module.decoder if component == "vae" else module


def call_parameters(pipe: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a pipeline's call, without `self`.

    They are read once for each class: every call needs them, several times, before the GPU has work.
    """
    return _parameters(type(pipe).__call__)


@functools.cache
def _parameters(method: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    every = list(inspect.signature(method).parameters.values())
    return MappingProxyType({parameter.name: parameter for parameter in every[1:]})


def weights_dtype(module: Any) -> torch.dtype | None:
    """Return the dtype of a module's first floating-point weight of 16 bits or more; None without one.

    diffusers' own `dtype` first searches every layer for hooks, while the GPU waits.
    """
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
    embeddings.
    """
    parameters = call_parameters(pipe)
    steps = call.get("num_inference_steps", parameters["num_inference_steps"].default)
    clashing = {
        "intermediate_timesteps": steps != 2,
        "negative_prompt": call.get("negative_prompt_embeds") is not None,
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
