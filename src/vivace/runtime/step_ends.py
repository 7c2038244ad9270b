"""Techniques' callbacks at the end of each step, before the caller's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vivace.machinery.technique import Effect


def with_step_ends(call: dict[str, Any], effects: Sequence[Effect]) -> dict[str, Any]:
    """Return a pipeline's call with the effects' step-end callbacks chained before the caller's own."""
    ours = [effect for effect in effects if effect.step_end is not None]
    if not ours:
        return call
    theirs = call.get("callback_on_step_end")
    # diffusers' callback objects declare their tensors themselves; functions are given those that the call names.
    declared = getattr(theirs, "tensor_inputs", None)
    if declared is None:
        declared = call.get("callback_on_step_end_tensor_inputs") or (["latents"] if theirs else [])
    inputs = list(dict.fromkeys([*declared, *(name for effect in ours for name in effect.step_end_inputs)]))

    def step_end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        merged = dict(tensors)
        for effect in ours:
            assert effect.step_end is not None
            merged |= effect.step_end(pipe, step, timestep, merged)
        if theirs is not None:
            merged |= theirs(pipe, step, timestep, merged) or {}
        return merged

    return call | {"callback_on_step_end": step_end, "callback_on_step_end_tensor_inputs": inputs}
