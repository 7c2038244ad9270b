"""What a call of a pipeline is given: defaults, negative prompts, the size of its picture; and if steps are left."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from vivace.spec.workload import steps_for, steps_run

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_PICTURES = ("image", "control_image")


def with_size_of_picture(defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return a call's defaults with the size of the picture that it is given, unless it is given a size too.

    diffusers would stretch the picture to the default size. The pipeline rounds the size itself.

    Args:
        given: the arguments of the call.
    """
    if "height" not in defaults or "height" in given or "width" in given:
        return defaults
    for name in _PICTURES:
        picture: Any = given.get(name)
        picture = picture[0] if isinstance(picture, list) and picture else picture
        if hasattr(picture, "convert"):  # PIL
            return defaults | {"width": picture.size[0], "height": picture.size[1]}
    return defaults


def why_no_steps(pipe: DiffusionPipeline, call: dict[str, Any]) -> str | None:
    """Return why a call would run no step, or None: with a small strength of few steps, a recipe may leave none."""
    strength, steps = call.get("strength"), call.get("num_inference_steps")
    if not isinstance(strength, int | float) or not isinstance(steps, int) or not 0 < strength <= 1:
        return None
    if steps_run(steps, strength, rounds_up=_rounds_up(pipe)) > 0:
        return None
    return (
        f"strength {strength:g} of {steps} steps runs none of them; give a strength of {1 / steps:.2g} or more, or "
        f"{steps_for(1, strength)} steps"
    )


def _rounds_up(pipe: DiffusionPipeline) -> bool:
    """Whether the pipeline rounds the share of the steps up. Flow-matching pipelines do; see `spec.workload`."""
    timesteps = getattr(type(pipe), "get_timesteps", None)
    return timesteps is not None and "int(num_inference_steps * strength)" not in inspect.getsource(timesteps)


def with_negative_prompts(
    defaults: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return a call's arguments, with the default negative prompt repeated for each prompt.

    FLUX's pipeline encodes a single text as one row, however many prompts there are. If negative embeddings are passed,
    the default negative prompt is left out, since pipelines do not accept both.
    """
    if kwargs.get("negative_prompt_embeds") is not None:
        defaults = {name: value for name, value in defaults.items() if name != "negative_prompt"}
    call = defaults | kwargs
    prompts = kwargs.get("prompt", args[0] if args else None)
    if prompts is None:
        prompts = kwargs.get("prompt_embeds")
    negative = defaults.get("negative_prompt")
    if "negative_prompt" not in kwargs and negative is not None and not isinstance(prompts, str | None):
        call["negative_prompt"] = [negative] * len(prompts)
    return call


def signature_defaults(pipe: DiffusionPipeline) -> dict[str, Any]:
    """Return the defaults of steps and guidance in the pipeline's `__call__`."""
    parameters = inspect.signature(pipe.__call__).parameters
    return {
        name: parameters[name].default
        for name in ("num_inference_steps", "guidance_scale")
        if name in parameters and parameters[name].default is not inspect.Parameter.empty
    }
