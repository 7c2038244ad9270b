"""Draw the same noise in every precision: in fp32, then rounded (docs/adr/0003). diffusers draws latents, and the noise
of ancestral samplers, in the dtype of the latents, in which a generator may return other numbers."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from vivace.machinery.samplers import Method, override
from vivace.machinery.technique import call_parameters, weights_dtype

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline


def draw_noise_in_fp32(pipe: DiffusionPipeline, *, shares_scheduler: bool = False) -> None:
    """Patch `pipe.prepare_latents`, `pipe.vae.encode` and `pipe.scheduler.step`, after the recipe is applied."""
    if not shares_scheduler:
        override(pipe.scheduler, "step", _stepping_in_fp32)
    is_patched = shares_scheduler and "encode" in vars(pipe.vae)  # of an earlier pipeline that shares it
    if "image" in call_parameters(pipe) and hasattr(pipe.vae, "encoder") and not is_patched:
        _sample_latents_in_fp32(pipe.vae)

    prepare = getattr(pipe, "prepare_latents", None)
    if prepare is not None and "dtype" in inspect.signature(prepare).parameters:
        pipe.prepare_latents = functools.partial(_prepare_in_fp32, pipe, prepare)


def _prepare_in_fp32(pipe: Any, prepare: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    bound = inspect.signature(prepare).bind(*args, **kwargs)
    dtype = bound.arguments["dtype"]
    bound.arguments["dtype"] = torch.float32
    vae = getattr(pipe, "vae", None)
    own = weights_dtype(vae)
    made = _cast(prepare(*bound.args, **bound.kwargs), dtype)
    if vae is not None and weights_dtype(vae) != own:
        # SDXL's pipelines encode images in fp32, and then cast the VAE to the dtype that they were given.
        vae.to(dtype=own)
    return made


def _stepping_in_fp32(step: Method) -> Method:
    import torch

    def step_in_fp32(
        self: Any, model_output: torch.Tensor, timestep: Any, sample: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        output = _cast(model_output, torch.float32)
        return _cast(step(self, output, timestep, sample, *args, **kwargs), sample.dtype)

    return step_in_fp32


def _sample_latents_in_fp32(vae: Any) -> None:
    """Patch `vae.encode`: its input is cast to the encoder's dtype, and its latents are sampled in fp32. A VAE encodes
    an image as a distribution, from which the pipeline samples with the call's generator."""
    vae.encode = functools.update_wrapper(functools.partial(_encode_in_fp32, vae, vae.encode), vae.encode)


def _encode_in_fp32(vae: Any, encode: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    own = next(vae.encoder.parameters()).dtype
    # Weights that are stored in 8 bits are cast, to the dtype of their inputs.
    output = encode(x.to(own) if own.is_floating_point and own.itemsize > 1 else x, *args, **kwargs)
    distribution = getattr(output, "latent_dist", None)
    if distribution is not None and hasattr(distribution, "parameters"):
        output.latent_dist = type(distribution)(
            distribution.parameters.float(), deterministic=distribution.deterministic
        )
    return output


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast floating-point tensors in a tensor, tuple or diffusers output; return other values as they are."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_cast(item, dtype) for item in value)
    if isinstance(value, dict):  # diffusers' BaseOutput
        for key in list(value):
            value[key] = _cast(value[key], dtype)
    return value
