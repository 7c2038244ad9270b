"""Arguments of a pipeline's call: those that it accepts, prompts in its form, its size, its contexts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from vivace.architectures import family_of_pipeline
from vivace.errors import Unsupported, UsageError, nearest
from vivace.foundation.spec.workload import Task, steps_for, steps_run
from vivace.machinery.technique import CallContext, call_of, call_parameters, ignores_guidance_scale
from vivace.machinery.technique.pipeline_code import encoded_names, rounds_steps_up
from vivace.models.sources import example_images

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline

    from vivace.runtime.session import Session


Call = Sequence[tuple[int, str, int]]
"""Index, prompt and seed of each image of one call."""
_IMAGES = ("image", "control_image")
_DEPRECATED = frozenset({"callback", "callback_steps"})
"""Arguments of diffusers' calls that are no parameters, and are used."""


def prompts_of(call: Call) -> dict[str, Any]:
    """Return a call's prompts as the pipeline's `prompt` argument: one text, or a list of several."""
    return {"prompt": call[0][1] if len(call) == 1 else [prompt for _, prompt, _ in call]}


def generators_of(call: Call) -> dict[str, Any]:
    """Return a call's generators, one for each image. The noise is drawn on the CPU, so that it is the same on every
    device."""
    import torch

    generators = [torch.Generator("cpu").manual_seed(seed) for _, _, seed in call]
    return {"generator": generators[0] if len(call) == 1 else generators}


def with_size_of_image(
    pipe: DiffusionPipeline, defaults: dict[str, Any], arguments: dict[str, Any]
) -> dict[str, Any]:
    """Return a call's defaults with the size of its image argument, unless the call sets a size itself. diffusers would
    stretch the image to the default size. The pipeline rounds the size itself, and FLUX.1 Kontext's would draw
    1024x1024 pixels whatever the size."""
    sizes = _of_its_image(defaults, arguments)
    return _area(pipe, sizes | arguments) | sizes


def example_call(pipe: DiffusionPipeline, size: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call besides a prompt, for calls that calibrate: shipped images, in one size."""
    return example_images(type(pipe).__name__, size) | _area(pipe, size)


def _area(pipe: DiffusionPipeline, size: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that make FLUX.1 Kontext draw the requested size."""
    height, width = size.get("height"), size.get("width")
    if "max_area" not in call_parameters(pipe) or not height or not width:
        return {}
    return {"max_area": height * width, "_auto_resize": False}


def _of_its_image(defaults: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    if "height" not in defaults or "height" in arguments or "width" in arguments:
        return defaults
    for name in _IMAGES:
        image: Any = arguments.get(name)
        image = image[0] if isinstance(image, list) and image else image
        if hasattr(image, "convert"):  # PIL
            return defaults | {"width": image.size[0], "height": image.size[1]}
    return defaults


def why_no_steps(pipe: DiffusionPipeline, call: dict[str, Any]) -> str | None:
    """Return why a call would run no step, or None. A small strength and few steps can leave none."""
    strength, steps = call.get("strength"), call.get("num_inference_steps")
    if not isinstance(strength, int | float) or not isinstance(steps, int) or not 0 < strength <= 1:
        return None
    if steps_run(steps, strength, rounds_up=rounds_steps_up(pipe)) > 0:
        return None
    return (
        f"strength {strength:g} of {steps} steps runs none of them; give a strength of {1 / steps:.2g} or more, or "
        f"{steps_for(1, strength)} steps"
    )


def follow_denoiser(pipe: DiffusionPipeline, device: str) -> None:
    """Move a pipeline's ControlNet to the device, and cast its inputs, which are the denoiser's, and its outputs.
    Techniques change the denoiser alone. The ControlNet is patched as an instance."""
    controlnet = getattr(pipe, "controlnet", None)
    if controlnet is None:
        return
    if controlnet.device.type != "meta":
        controlnet.to(device)
    cast_forward = functools.partial(_cast_forward, controlnet.forward, controlnet.dtype)
    controlnet.forward = functools.update_wrapper(cast_forward, controlnet.forward)


def _cast_forward(forward: Callable[..., Any], own: torch.dtype, /, *args: Any, **kwargs: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_map_only

    def cast(values: Any, dtype: torch.dtype) -> Any:
        # Timesteps, which are scalars or rows of numbers, are cast where they are embedded.
        return tree_map_only(
            torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() and t.dim() > 1 else t, values
        )

    latents = args[0] if args else kwargs.get("sample", kwargs.get("hidden_states"))
    assert latents is not None
    return cast(forward(*cast(args, own), **cast(kwargs, own)), latents.dtype)


def accepted_by(pipe: DiffusionPipeline) -> set[str]:
    """Return the names of the arguments that the pipeline's call uses."""
    parameters = call_parameters(pipe)
    scale = parameters.get("guidance_scale")
    # QwenImagePipeline warns of any scale, Flux2KleinPipeline of its own default.
    without = scale is not None and scale.default is None and ignores_guidance_scale(pipe)
    return set(parameters) - ({"guidance_scale"} if without else set())


def call_in_words(pipe: Any) -> str:
    """Return the beginning of a sentence about what the pipeline's call takes."""
    call = call_of(pipe)
    if call.is_known:
        return f"the call of {type(pipe).__name__} takes"
    return (
        f"what the call of {type(pipe).__name__} passes its arguments on to cannot be followed, and it names"
    )


def takes_prompts_first(pipe: DiffusionPipeline) -> bool:
    """Return whether prompts are the first argument of the pipeline's call. FLUX.2's take the image to edit first."""
    call = call_of(pipe)
    return next(iter(call.parameters), "") == "prompt" or not call.is_known


def as_the_pipeline_takes(
    pipe: DiffusionPipeline, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments with prompts by name where the pipeline's first argument is another. Lists of prompts
    are copied: ZImagePipeline writes into the one that it is given."""
    only = args[0] if len(args) == 1 else None
    if _is_text(only) and not takes_prompts_first(pipe):
        args, kwargs = (), {"prompt": only} | kwargs
    copied = {name: list(value) for name, value in kwargs.items() if _is_list_of_text(value)}
    return tuple(list(v) if _is_list_of_text(v) else v for v in args), kwargs | copied


def refuse_ignored(pipe: DiffusionPipeline, names: Iterable[str]) -> None:
    """Refuse arguments by name that a pipeline would take and ignore: Stable Diffusion's calls take any. A size beside
    a source image is no mistake: the image has one."""
    call = call_of(pipe)
    parameters = call.parameters
    if not call.is_known or not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    names = tuple(names)
    has_size = any(name in names for name in _IMAGES)
    for name in names:
        if name in ("height", "width") and has_size:
            continue
        if name not in parameters and name not in _DEPRECATED:
            advice = (
                "; give generator=torch.Generator().manual_seed(SEED)"
                if name == "seed"
                else nearest(name, parameters)
            )
            raise UsageError(f"{type(pipe).__name__} ignores the argument {name!r}{advice}")


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], str)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or _is_list_of_text(value)


def with_negative_prompts(
    defaults: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return a call's arguments, with the default negative prompt repeated for each prompt. FLUX's pipeline encodes a
    single text as one row, however many prompts there are. If negative embeddings are passed, the default negative
    prompt is left out, since pipelines do not accept both."""
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
    parameters = call_parameters(pipe)
    return {
        name: parameters[name].default
        for name in ("num_inference_steps", "guidance_scale")
        if name in parameters and parameters[name].default is not inspect.Parameter.empty
    }


def in_contexts(forward: Callable[..., Any], contexts: Sequence[CallContext]) -> Callable[..., Any]:
    """Return a forward that runs inside the contexts. A copy of the module runs its own."""
    return functools.partial(_run_in_contexts, forward, contexts)


def _run_in_contexts(
    forward: Callable[..., Any], contexts: Sequence[CallContext], /, *args: Any, **kwargs: Any
) -> Any:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        return forward(*args, **kwargs)


_INSTRUCTION = "complex_human_instruction"
"""Sana's argument for the instruction to its language model."""


def encode(session: Session, prompts: Sequence[str], task: Task = "text") -> dict[str, Any]:
    """Return the prompts' embeddings as keyword arguments for `session(...)`, on the pipeline's device."""
    import torch

    pipe, defaults = session.pipe, session.defaults
    name = type(pipe).__name__
    family = family_of_pipeline(name)
    off = 1.0 if family is None or family.doubled is None else family.doubled.off
    if not hasattr(pipe, "encode_prompt"):
        raise Unsupported(f"{name} takes no embeddings: it has no encode_prompt; measure with --text prompts")
    arguments = {
        "prompt": list(prompts),
        "prompt_2": None,
        "prompt_3": None,
        "device": pipe._execution_device,
        "num_images_per_prompt": 1,
        "do_classifier_free_guidance": float(defaults.get("guidance_scale", 0)) > off,
        "max_sequence_length": defaults.get("max_sequence_length"),
    }
    for_call = call_parameters(pipe)
    if _INSTRUCTION in for_call:  # put in front of each prompt, by the call alone
        arguments[_INSTRUCTION] = session.arguments.get(_INSTRUCTION, for_call[_INSTRUCTION].default)
    # The class's method: on the instance it may be wrapped by a timer.
    accepted = inspect.signature(type(pipe).encode_prompt).parameters
    if "image" in accepted and task == "edit":
        raise Unsupported(f"{name} encodes prompts together with images; measure with --text prompts")
    arguments = {
        k: v for k, v in arguments.items() if k in accepted and not (k == "max_sequence_length" and v is None)
    }
    with torch.no_grad(), session.surroundings():
        encoded = pipe.encode_prompt(**arguments)
        names = encoded_names(pipe)
        if not isinstance(encoded, tuple) or len(names) != len(encoded):
            raise Unsupported(f"{name} returns embeddings in an unknown format; measure with --text prompts")
        embeddings = {
            key: value for key, value in zip(names, encoded, strict=True) if key and value is not None
        }
        negative = session.arguments.get("negative_prompt")
        # True CFG: the negative prompt is encoded like a prompt.
        if negative is not None and "negative_prompt_embeds" not in names:
            encoded = pipe.encode_prompt(**arguments | {"prompt": [negative] * len(prompts)})
            embeddings |= {f"negative_{key}": value for key, value in zip(names, encoded, strict=True) if key}
    return embeddings
