"""Set the number of denoising steps.

Why: the call's time is nearly proportional to it. Every step cache must be compared with simply taking fewer steps.
Costs: coarser integration, so another image; with too few steps for the sampler shapes dissolve.
Source: Song et al., DDIM, arXiv 2010.02502 (section 4: the number of steps is free at sampling time).
"""

from __future__ import annotations

from typing import ClassVar

from vivace.errors import NoEffect
from vivace.machinery.technique import Effect, Stage, Target, Technique, TechniqueFacts, knob
from vivace.machinery.technique.script import Script


class Steps(Technique):
    name: ClassVar[str] = "steps"
    summary: ClassVar[str] = "number of denoising steps"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.SCHEDULE,
        owns="number of steps",
        same_picture=False,
    )

    steps: int = knob(ge=1, le=1000, tune=[8, 12, 20], about="denoising steps")

    def unsupported(self, target: Target) -> str | None:
        config = target.pipe.scheduler.config if target.pipe is not None else {}
        if self.steps == 1 and config.get("shift_terminal"):
            return "this model's scheduler stretches noise levels between the first step and the last: take 2 or more"
        return None

    def apply(self, target: Target) -> Effect:
        before = target.model.defaults.get("num_inference_steps")
        if before == self.steps:
            raise NoEffect(f"{self.steps} is already the workload's number of steps", already_so=True)
        changed: dict[str, int | float | str] = {"num_inference_steps": self.steps}
        if before is not None:
            changed["num_inference_steps_before"] = before
        return Effect(changed=changed, call={"num_inference_steps": self.steps})

    def script(self, target: Target) -> Script:
        return Script(call={"num_inference_steps": self.steps})
