"""Noise of samplers from the generators of the pipeline's call, where the pipeline does not pass them on."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from vivace.errors import Unsupported

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
    """Replace a method of one scheduler.

    Args:
        made_of: returns the new method of the one before it; both take the scheduler first.
    """
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
