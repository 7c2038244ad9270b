"""What vivace knows of diffusers' samplers: the noise that they draw, numbers of steps, and predictions that they take.

diffusers leaves most limits to errors of numpy in the middle of a call, or draws noise in silence.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from vivace.errors import Unsupported

_CONSISTENCY = ("LCMScheduler", "TCDScheduler")
_AT_LEAST_TWO_WITH_KARRAS = ("DEISMultistepScheduler", "SASolverScheduler")
_PROBED_STEPS = 20
_BY_INDEX = (
    "DDIMScheduler", "DDPMScheduler", "PNDMScheduler", "LMSDiscreteScheduler", "DPMSolverMultistepScheduler",
    "DEISMultistepScheduler", "UniPCMultistepScheduler", "SASolverScheduler",
)  # fmt: skip
"""Samplers that look noise levels up by the timestep, which must be one of the model's."""


def refused_steps(pipe: Any, call: Mapping[str, Any]) -> str | None:
    """Return why the sampler refuses a call's number of steps, and which it accepts; None if it accepts it."""
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
    """Return why a scheduler cannot read the model's predictions, by one step on a few numbers, or ends in noise."""
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


Method = Callable[..., Any]
"""Takes the scheduler first."""


def give_generators(pipe: Any) -> None:
    """Make the pipeline's scheduler take its noise from the generators of the call."""
    scheduler = pipe.scheduler
    prepare = pipe.prepare_latents
    signature = inspect.signature(prepare)
    generators: list[Any] = [None]

    def prepare_and_remember(*args: Any, **kwargs: Any) -> Any:
        generators[0] = signature.bind(*args, **kwargs).arguments.get("generator")
        return prepare(*args, **kwargs)

    def check(stepped: Any) -> None:
        if stepped is not scheduler:
            raise Unsupported(
                f"this {type(stepped).__name__} is a copy of a session's, which gets its noise from the generators of "
                "the session's calls; apply the recipe to the other pipeline too, and give it no copy"
            )

    def with_generator(step: Method) -> Method:
        def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
            check(self)
            return step(self, *args, **{"generator": generators[0]} | kwargs)

        return stepped

    def with_tree(step: Method) -> Method:
        def stepped(
            self: Any, model_output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any
        ) -> Any:
            check(self)
            if self.noise_sampler is None:  # a call's first step
                self.noise_sampler = _noise_on_cpu(self, sample, generators[0])
            return step(self, model_output, timestep, sample, *args, **kwargs)

        return stepped

    prepare_and_remember.__signature__ = signature  # type: ignore[attr-defined]
    pipe.prepare_latents = prepare_and_remember
    takes_generator = "generator" in inspect.signature(scheduler.step).parameters
    override(scheduler, "step", with_generator if takes_generator else with_tree)


def _noise_on_cpu(scheduler: Any, sample: Any, generators: Any) -> Callable[[Any, Any], Any]:
    """Return Brownian noise per generator, in fp32 on the CPU so that it is the same for all dtypes and devices."""
    import torch
    from diffusers.schedulers.scheduling_dpmsolver_sde import BrownianTreeNoiseSampler

    seeds: Any = None
    if generators is not None:
        alone = not isinstance(generators, list)
        seeds = generators.initial_seed() if alone else [each.initial_seed() for each in generators]
    levels = scheduler.sigmas[scheduler.sigmas > 0]
    like = torch.zeros(sample.shape, dtype=torch.float32)
    # Slightly wider, since the requested levels have been through logarithms.
    sampler = BrownianTreeNoiseSampler(like, 0.999 * levels.min().item(), 1.001 * levels.max().item(), seeds)
    return lambda sigma, following: sampler(sigma, following).to(sample.device, sample.dtype)


# A function that is put on an instance refers to that instance. A copy (`copy.deepcopy`, as diffusers' maintainers
# advise for threads) would carry the function and step the original. So the instance gets a class of its own, derived
# from its class and called like it. Neither its class nor other instances change.
def override(scheduler: Any, name: str, made_of: Callable[[Method], Method]) -> None:
    """Replace a method of one scheduler by what `made_of` returns; both take the scheduler first."""
    kind = type(scheduler)
    before: Method = getattr(kind, name)
    own = vars(scheduler).pop(name, None)
    if own is not None:  # a caller's own, of this instance alone
        before = _without_self(own)
    method = functools.wraps(getattr(kind, name))(made_of(before))
    called_alike = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    scheduler.__class__ = type(kind.__name__, (kind,), {**called_alike, name: method})


def _without_self(function: Callable[..., Any]) -> Method:
    return lambda _, *args, **kwargs: function(*args, **kwargs)
