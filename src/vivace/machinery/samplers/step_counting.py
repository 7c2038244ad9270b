"""Find the step of a schedule that a call of the denoiser belongs to. Samplers of higher order make several calls a
step."""

from __future__ import annotations

from typing import Any

_RUNGE_KUTTA_STEPS, _RUNGE_KUTTA_CALLS = 3, 4
"""PNDM's first steps, unless it skips them, and the calls of each."""


def num_calls(pipe: Any) -> int:
    """Return how many steps of its sampler the pipeline's current call makes: its loop's length.

    Old pipelines do not say; then it is the sampler's timesteps from where it begins.
    """
    number = getattr(pipe, "num_timesteps", None)
    if number is not None:
        return int(number)
    return len(pipe.scheduler.timesteps) - int(getattr(pipe.scheduler, "begin_index", None) or 0)


def step_of_each_call(scheduler: Any, calls: int) -> list[int]:
    """Return, for each call of the denoiser in a loop of that length, the index of its step.

    Heun's, DPM2's and DPM++ SDE's steps have two calls each but the last, which has one. PNDM begins with three
    Runge-Kutta steps of four calls, or, if it skips them, with one of two.
    """
    if hasattr(scheduler, "prk_timesteps"):
        return _of_pndm(scheduler, calls)
    order = int(getattr(scheduler, "order", 1))
    return [call // order for call in range(calls)]


def _of_pndm(scheduler: Any, calls: int) -> list[int]:
    if scheduler.config.skip_prk_steps:
        return [max(0, call - 1) for call in range(calls)]
    first = _RUNGE_KUTTA_STEPS * _RUNGE_KUTTA_CALLS
    return [
        call // _RUNGE_KUTTA_CALLS if call < first else call - first + _RUNGE_KUTTA_STEPS
        for call in range(calls)
    ]
