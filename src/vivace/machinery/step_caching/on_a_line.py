"""Kept tensors continued on a straight line through the last two computed steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace.machinery.step_caching.cache_state import CacheState

if TYPE_CHECKING:
    import torch


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
