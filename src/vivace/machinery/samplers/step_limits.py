"""Limits of samplers: numbers of steps, and models that end in pure noise or predict something other than noise.

diffusers leaves most of this to errors of numpy in the middle of a call, or draws noise in silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

_CONSISTENCY = ("LCMScheduler", "TCDScheduler")
_AT_LEAST_TWO_WITH_KARRAS = ("DEISMultistepScheduler", "SASolverScheduler")
_PROBED_STEPS = 20
_BY_INDEX = (
    "DDIMScheduler", "DDPMScheduler", "PNDMScheduler", "LMSDiscreteScheduler", "DPMSolverMultistepScheduler",
    "DEISMultistepScheduler", "UniPCMultistepScheduler", "SASolverScheduler",
)  # fmt: skip
"""Samplers that look noise levels up by the timestep, which must be one of the model's."""


def refused_steps(pipe: Any, call: Mapping[str, Any]) -> str | None:
    """Return why the pipeline's sampler refuses a call's number of steps, and which it accepts; None if it accepts
    it."""
    steps = call.get("num_inference_steps")
    if not isinstance(steps, int) or any(call.get(name) is not None for name in ("timesteps", "sigmas")):
        return None
    scheduler = pipe.scheduler
    name = type(scheduler).__name__
    least, most = _fewest(scheduler), _most(pipe, call)
    if steps < least or steps > most:
        of_its = f" of its {most} timesteps" if name in _CONSISTENCY else ""
        return f"{name} takes {least} to {most} steps{of_its}, got {steps}"
    last = _last_leading_timestep(scheduler, steps)
    if last is not None and last >= scheduler.config.num_train_timesteps:
        return (
            f"{name} with spacing 'leading' would begin {steps} steps at timestep {last}, and the model has 0 to "
            f"{scheduler.config.num_train_timesteps - 1}; give fewer steps, or another spacing"
        )
    return None


def _fewest(scheduler: Any) -> int:
    config, name = scheduler.config, type(scheduler).__name__
    if name == "PNDMScheduler":
        return 2 if config.get("skip_prk_steps") else 4  # the first three are Runge-Kutta's, which look ahead
    if config.get("shift_terminal"):
        return 2  # noise levels are stretched between the first step and the last
    if name in _AT_LEAST_TWO_WITH_KARRAS and config.get("use_karras_sigmas"):
        return 2
    return 1


def _most(pipe: Any, call: Mapping[str, Any]) -> int:
    config, name = pipe.scheduler.config, type(pipe.scheduler).__name__
    most = int(config.get("num_train_timesteps", 1000))
    if name not in _CONSISTENCY:
        return most
    own = int(call.get("original_inference_steps") or config.get("original_inference_steps") or most)
    # Pipelines made for LCMs alone tell their sampler where it begins.
    strength = call.get("strength")
    is_for_lcms = "original_inference_steps" in inspect.signature(type(pipe).__call__).parameters
    if isinstance(strength, int | float) and is_for_lcms:
        own = int(own * strength)
    return min(most, own)


def _last_leading_timestep(scheduler: Any, steps: int) -> int | None:
    config = scheduler.config
    if type(scheduler).__name__ not in _BY_INDEX or config.get("timestep_spacing") != "leading":
        return None
    return int((steps - 1) * (config.num_train_timesteps // steps) + config.get("steps_offset", 0))


def takes_zero_snr(kind: Any) -> bool:
    """Whether a class of scheduler can begin at pure noise, at which some models are trained to begin."""
    return "rescale_betas_zero_snr" in inspect.signature(kind.__init__).parameters


def refused_by_model(scheduler: Any) -> str | None:
    """Return why a scheduler cannot read the model's predictions, in diffusers' words, or ends in noise; else None.

    It makes one step on a few numbers.
    """
    import torch

    accepted = inspect.signature(scheduler.set_timesteps).parameters
    shifts = "mu" in accepted and scheduler.config.get("use_dynamic_shifting")
    try:
        scheduler.set_timesteps(_PROBED_STEPS, **({"mu": 1.0} if shifts else {}))
    except AssertionError:  # diffusers has no words for it
        kind = scheduler.config.get("time_shift_type")
        return (
            f"it shifts noise levels exponentially, and this model's are shifted by time_shift_type={kind!r}"
        )
    sigmas = getattr(scheduler, "sigmas", None)
    if sigmas is not None and float(sigmas[-1]) == float(sigmas[-2]) > 0:
        return f"its last step does nothing and leaves noise: it begins and ends at noise level {float(sigmas[-1]):.2g}"
    timestep = scheduler.timesteps[0]
    numbers = torch.zeros(1, 4, 1, 1)
    sample = (
        scheduler.scale_model_input(numbers, timestep) if hasattr(scheduler, "scale_model_input") else numbers
    )
    try:
        with torch.random.fork_rng(devices=[]):
            scheduler.step(numbers, timestep, sample)
    except (ValueError, NotImplementedError) as error:
        return " ".join(str(error).split())
    return None
