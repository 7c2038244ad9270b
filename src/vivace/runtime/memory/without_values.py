"""Replacements for the places where pipelines read values of tensors, which tensors on the meta device lack.

Timesteps stay on the CPU. Where a pipeline reads masks or positions, the same is known from the prompts' tokens or the
image's size. All patches are on the instance.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vivace.architectures import pipeline_named
from vivace.architectures.family import move_to_meta
from vivace.machinery.technique import TEXT_ENCODERS, component_of

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline


def run_without_values(pipe: DiffusionPipeline, height: int, width: int) -> None:
    """Patch a pipeline on the meta device so that its call runs.

    Args:
        height, width: pixels of the image that the call will draw.
    """
    keep_timesteps_on_cpu(pipe)
    for encoder in (component_of(pipe, component) for component in TEXT_ENCODERS):
        if encoder is not None:
            encoder.register_forward_pre_hook(_without_mask, with_kwargs=True)
    known = pipeline_named(type(pipe).__name__)
    if known is not None and known.run_without_values is not None:
        known.run_without_values(pipe, height, width)


def keep_timesteps_on_cpu(pipe: DiffusionPipeline) -> None:
    """Patch a pipeline on the meta device so that it can read the values of the timesteps.

    Only the denoiser's arguments are moved to the meta device. The scheduler and the denoiser are patched as instances.
    """
    scheduler, known = pipe.scheduler, pipeline_named(type(pipe).__name__)
    if known is None or known.reads_timesteps:
        set_timesteps = scheduler.set_timesteps

        @functools.wraps(set_timesteps)
        def set_on_cpu(*args: Any, **kwargs: Any) -> Any:
            return set_timesteps(*args, **(kwargs | {"device": "cpu"} if "device" in kwargs else kwargs))

        scheduler.set_timesteps = set_on_cpu
    denoiser = component_of(pipe, "denoiser")
    denoiser.register_forward_pre_hook(move_to_meta, with_kwargs=True)
    if getattr(pipe, "controlnet", None) is not None:
        pipe.controlnet.register_forward_pre_hook(move_to_meta, with_kwargs=True)
    if getattr(pipe, "safety_checker", None) is not None:
        pipe.safety_checker = None  # it reads the image's values; its weights have been counted


def _without_mask(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Drop the mask: language models check whether it masks anything, or without a key cache whether there is one."""
    mask = kwargs.get("attention_mask")
    if mask is None:
        return args, kwargs
    if kwargs.get("use_cache", True):
        return args, kwargs | {"attention_mask": None}
    rows, length = mask.shape
    return args, kwargs | {"attention_mask": mask.new_ones(rows, 1, length, length, dtype=mask.dtype).bool()}
