"""The same noise in every precision.

diffusers draws the initial latents, and the noise that ancestral samplers add, in the dtype of the latents. Where a
generator gives other numbers in another dtype, a recipe that only changes a dtype would be compared with the picture of
another seed. Here noise is always drawn in fp32 and then rounded (docs/adr/0003).

The pipeline and its scheduler are patched, never their classes.
"""

from __future__ import annotations

import inspect
from typing import Any


def draw_noise_in_fp32(pipe: Any) -> None:
    """Patch `pipe.prepare_latents` and `pipe.scheduler.step`; call it when the scheduler is the final one."""
    import torch

    prepare = getattr(pipe, "prepare_latents", None)
    if prepare is not None and "dtype" in inspect.signature(prepare).parameters:
        signature = inspect.signature(prepare)

        def prepare_in_fp32(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            dtype = bound.arguments["dtype"]
            bound.arguments["dtype"] = torch.float32
            return _to(prepare(*bound.args, **bound.kwargs), dtype)

        pipe.prepare_latents = prepare_in_fp32
    step = pipe.scheduler.step

    def step_in_fp32(model_output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
        return _to(step(_to(model_output, torch.float32), timestep, sample, *args, **kwargs), sample.dtype)

    # Pipelines read from the signature what a scheduler accepts (generator, eta).
    step_in_fp32.__signature__ = inspect.signature(step)  # type: ignore[attr-defined]
    pipe.scheduler.step = step_in_fp32


def _to(value: Any, dtype: Any) -> Any:
    """Tensors of a tensor, tuple or diffusers output in another floating dtype; the rest as it is."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_to(item, dtype) for item in value)
    if isinstance(value, dict):  # diffusers' BaseOutput
        for key in list(value):
            value[key] = _to(value[key], dtype)
    return value
