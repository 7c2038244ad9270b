"""The effect of applying a technique."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from vivace.machinery.technique.anatomy import Component

CallContext = Callable[[], AbstractContextManager[object]]
Facts = dict[str, int | float | str]


@dataclass
class Effect:
    """The effect of applying a technique.

    Attributes:
        changed: counts and names for the Record, e.g. {"denoiser.quantized_layers": 52}.
        notes: remarks for the user, shown with the results and kept in the Record.
        call: defaults of the call that the technique sets, e.g. {"num_inference_steps": 20}.
        step_end: called after each denoising step as diffusers' `callback_on_step_end`; returns its kwargs.
        step_end_inputs: tensors that `step_end` reads and changes.
        contexts: entered around the forward of one component's working part.
        around: entered around the whole call, for settings of the process, which must not outlive it.
        evidence: called after a run; returns observations for the Record.
        forget: called before a call whose prompts count as new, to drop prompts of earlier calls.
        refuted: given the evidence of a run, why the technique had no effect after all, or None.
        finish: called once all techniques have been applied, to wrap all that they changed.
        close: called when the session is closed, also if a later technique was refused.
    """

    changed: Facts = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    call: dict[str, Any] = field(default_factory=dict)
    step_end: Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]] | None = None
    step_end_inputs: tuple[str, ...] = ()
    contexts: dict[Component, CallContext] = field(default_factory=dict)
    around: CallContext | None = None
    evidence: Callable[[], Mapping[str, int | float | str | list[str]]] | None = None
    forget: Callable[[], None] | None = None
    refuted: Callable[[dict[str, Any]], str | None] | None = None
    finish: Callable[[], None] | None = None
    close: Callable[[], None] | None = None
