"""The state of samplers at a noise level, and the image and noise in a model's output."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_HISTORIES = ("ets", "derivatives", "order_list", "noise_sampler", "prev_derivative")
"""Attributes in which samplers keep earlier steps, and which they need amid a schedule."""


def unsupported_sampler(scheduler: Any) -> str | None:
    """Return why a sampler cannot go on at another size, or None."""
    name, instead = (
        type(scheduler).__name__,
        "take another sampler, such as scheduler(euler) or scheduler(dpmpp_2m)",
    )
    if getattr(scheduler, "order", 1) != 1 or any(hasattr(scheduler, kept) for kept in _HISTORIES):
        return f"{name} needs its earlier steps, which have the lower resolution; {instead}"
    is_supported = hasattr(scheduler, "alphas_cumprod") or _is_flow(scheduler)
    if not is_supported or hasattr(scheduler, "precondition_outputs"):
        return f"the noise levels of {name} are not known here; {instead}"
    return None


def prediction_type(scheduler: Any) -> str:
    return str(scheduler.config.get("prediction_type", "flow_prediction"))


def _is_flow(scheduler: Any) -> bool:
    return prediction_type(scheduler) == "flow_prediction"


def predicted(
    kind: str, output: torch.Tensor, sample: torch.Tensor, scale: float, sigma: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the image and the noise that the model predicts; the sample is `scale * image + sigma * noise`."""
    if kind == "flow_prediction":  # the noise minus the image
        return sample - sigma * output, sample + scale * output
    norm = math.hypot(scale, sigma)
    if kind == "v_prediction":  # of a sample of variance 1
        sample, scale, sigma = sample / norm, scale / norm, sigma / norm
        return scale * sample - sigma * output, sigma * sample + scale * output
    if kind == "sample":
        return output, (sample - scale * output) / sigma
    return (sample - sigma * output) / scale, output


def level(scheduler: Any, step: int) -> tuple[float, float]:
    """Return the factors of image and noise in the latents that a step begins with."""
    sigmas = getattr(scheduler, "sigmas", None)
    if sigmas is None or len(sigmas) != len(scheduler.timesteps) + 1:
        image = (
            float(scheduler.alphas_cumprod[int(scheduler.timesteps[step])])
            if step < len(scheduler.timesteps)
            else 1.0
        )
        return math.sqrt(image), math.sqrt(1 - image)
    sigma = float(sigmas[step])
    if _is_flow(scheduler):
        return 1 - sigma, sigma
    # Euler's latents are the image plus noise; those of the others have variance 1.
    norm = 1.0 if float(scheduler.init_noise_sigma) != 1.0 else math.hypot(1.0, sigma)
    return 1 / norm, sigma / norm


def shift_of(config: Any, shift: float, ratio: float) -> float:
    """Return the shift of full size, which grows linearly with the number of tokens, from that of a low size."""
    least, most = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    slope = (config.get("max_shift", 1.15) - config.get("base_shift", 0.5)) / (most - least)
    offset = config.get("base_shift", 0.5) - slope * least
    return float(offset + (shift - offset) * ratio)


def scaled_levels(scheduler: Any, scale: float) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return timesteps and sigmas with each noise level, noise over image, multiplied; None without sigmas."""

    timesteps, sigmas = scheduler.timesteps, getattr(scheduler, "sigmas", None)
    if sigmas is None or len(sigmas) != len(timesteps) + 1:
        return None
    if _is_flow(scheduler):
        scaled = scale * sigmas / (1 - sigmas + scale * sigmas)
        of_training = scaled[:-1] * scheduler.config.num_train_timesteps
    else:
        scaled = scale * sigmas
        levels = ((1 - scheduler.alphas_cumprod) / scheduler.alphas_cumprod).sqrt().log().to(sigmas)
        of_training = _interpolated(scaled[:-1].log(), levels)
    if not timesteps.is_floating_point():
        of_training = of_training.round()
    return of_training.to(timesteps), scaled


def _interpolated(values: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Return the fractional places of values in an ascending list."""
    import torch

    above = torch.searchsorted(levels, values).clamp(1, len(levels) - 1)
    low, high = levels[above - 1], levels[above]
    return (above - 1 + ((values - low) / (high - low)).clamp(0, 1)).to(values)


def forget_history(scheduler: Any) -> None:
    """Drop a solver's earlier predictions, so that it goes on as at its first step."""
    if hasattr(scheduler, "model_outputs"):
        scheduler.model_outputs = [None] * len(scheduler.model_outputs)
        scheduler.lower_order_nums = 0
    if hasattr(scheduler, "last_sample"):
        scheduler.last_sample = None
