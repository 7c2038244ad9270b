"""The state of a step cache within a call: the kept tensors, the step, the timestep, and the change of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass
class CacheState:
    """The state of one kind of the denoiser's calls, from the start of a pipeline's call to its end.

    Guidance that takes two calls of the denoiser per step makes two kinds, each with a state.

    Attributes:
        step: the step that is being decided, from 0.
        kept: tensors that a hit can reuse.
        previous: what was kept before, while a step is computed, for a `keep` that builds on it.
        shape: of the input that `kept` was computed for.
        args, inputs: the denoiser's arguments, by position and by name, while the step is being decided.
        notes: whatever the technique wants to remember.
    """

    step: int = -1
    kept: tuple[torch.Tensor, ...] = ()
    previous: tuple[torch.Tensor, ...] = ()
    shape: Hashable = None
    args: tuple[Any, ...] = ()
    inputs: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


Look = Callable[[], Any]
"""Computes the input of a hit's decision, e.g. the modulated input of the first block."""
IsHit = Callable[[CacheState, Look], bool]
"""Whether the step can be skipped. Called in every step; a step for which nothing is kept is computed all the same."""


def timestep_of(pipe: Any, state: CacheState) -> float:
    """Return the timestep of the step that is being decided; the scheduler is read once per call."""
    if "timesteps" not in state.notes:
        state.notes["timesteps"] = pipe.scheduler.timesteps.tolist()[-pipe.num_timesteps :]
    timesteps = state.notes["timesteps"]
    return float(timesteps[min(state.step, len(timesteps) - 1)])


def steps_before(pipe: Any) -> int:
    """Return how many steps of the schedule are not run: image-to-image begins in the middle of it."""
    order = getattr(pipe.scheduler, "order", 1)
    return max(0, (len(pipe.scheduler.timesteps) - int(pipe.num_timesteps)) // order)


def relative_change(new: torch.Tensor, old: torch.Tensor) -> float:
    """Return the L1 norm of the difference, divided by that of the older tensor."""
    return float((new.float() - old.float()).abs().mean() / old.float().abs().mean())


def with_slopes(state: CacheState, computed: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the tensors, and behind them their changes per step since those computed before, if there are any."""
    num = len(computed)
    steps = state.step - state.notes.get("computed_at", state.step)
    state.notes["computed_at"], state.notes["num_computed"] = state.step, num
    if not state.previous or not steps:
        return computed
    earlier = state.previous[:num]
    return computed + tuple((new - old) / steps for new, old in zip(computed, earlier, strict=True))


def on_a_line(state: CacheState) -> tuple[torch.Tensor, ...]:
    """Return the tensors extrapolated to the current step; `state.kept` is the result of `with_slopes`."""
    num = state.notes["num_computed"]
    tensors, slopes = state.kept[:num], state.kept[num:]
    if not slopes:
        return tensors
    steps = state.step - state.notes["computed_at"]
    return tuple(tensor + steps * slope for tensor, slope in zip(tensors, slopes, strict=True))
