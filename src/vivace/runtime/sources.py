"""Calls that start from a picture: the size that they draw, and how many steps they run."""

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
