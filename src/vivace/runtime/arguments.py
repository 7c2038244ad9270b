"""What a pipeline's call is given: arguments that it accepts, prompts as it takes them, negative prompts."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from vivace.contract import ignores_guidance_scale

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def accepted_by(pipe: DiffusionPipeline) -> set[str]:
    """Return the names of the arguments that the pipeline's call has a use for."""
    parameters = inspect.signature(pipe.__call__).parameters
    scale = parameters.get("guidance_scale")
    # QwenImagePipeline warns of any scale, Flux2KleinPipeline of its own default.
    without = scale is not None and scale.default is None and ignores_guidance_scale(pipe)
    return set(parameters) - ({"guidance_scale"} if without else set())


def takes_prompts_first(pipe: DiffusionPipeline) -> bool:
    """Return whether prompts are the first argument of the pipeline's call. FLUX.2's take the image to edit first."""
    return next(iter(inspect.signature(pipe.__call__).parameters)) == "prompt"


def as_the_pipeline_takes(
    pipe: DiffusionPipeline, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments with prompts by name where the pipeline takes another argument first.

    Lists of prompts are copied: ZImagePipeline writes into the one that it is given.
    """
    only = args[0] if len(args) == 1 else None
    if _is_text(only) and not takes_prompts_first(pipe):
        args, kwargs = (), {"prompt": only} | kwargs
    copied = {name: list(value) for name, value in kwargs.items() if _is_list_of_text(value)}
    return tuple(list(v) if _is_list_of_text(v) else v for v in args), kwargs | copied


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], str)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or _is_list_of_text(value)


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
