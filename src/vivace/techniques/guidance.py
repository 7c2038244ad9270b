"""A given guidance scale.

Why: at 1 or below, models with classifier-free guidance skip the unconditional branch: half the denoiser's work.
Costs: another picture; too little guidance ignores the prompt, too much burns the colours.
Source: Ho and Salimans, Classifier-Free Diffusion Guidance, arXiv 2207.12598.
"""

from __future__ import annotations

from typing import ClassVar

from vivace.errors import NoEffect
from vivace.spec.script import Script
from vivace.spec.technique import Effect, Stage, Target, Technique, knob


class Guidance(Technique):
    name: ClassVar[str] = "guidance"
    summary: ClassVar[str] = "guidance scale"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    owns: ClassVar[str] = "guidance scale"
    same_picture: ClassVar[bool] = False

    scale: float = knob(ge=0, le=100, tune=[1.0, 3.0, 5.0], about="guidance scale; 1 switches it off")

    def unsupported(self, target: Target) -> str | None:
        return None

    def apply(self, target: Target) -> Effect:
        before = target.defaults.get("guidance_scale")
        if before == self.scale:
            raise NoEffect(f"{self.scale:g} is the workload's own guidance scale", already_so=True)
        changed: dict[str, int | float | str] = {"guidance_scale": self.scale}
        if before is not None:
            changed["guidance_scale_before"] = before
        return Effect(changed=changed, call={"guidance_scale": self.scale})

    def script(self, target: Target) -> Script:
        return Script(call={"guidance_scale": self.scale})
