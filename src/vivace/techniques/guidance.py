"""Set the guidance scale.

Why: at 1 or below, models with classifier-free guidance skip the unconditional branch: half the denoiser's work.
Costs: another image; too little guidance ignores the prompt, too much oversaturates. `true_cfg` doubles the denoiser's
    work.
Source: Ho and Salimans, Classifier-Free Diffusion Guidance, arXiv 2207.12598.

FLUX.1 [dev] has guidance distilled into the model: the scale is one of its inputs, and costs nothing. `true_cfg` adds
guidance with a second, unconditional call, for pipelines that take a `true_cfg_scale` (FLUX, Qwen-Image). It uses the
empty prompt, unless the call has a `negative_prompt`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vivace.errors import NoEffect
from vivace.machinery.technique import (
    Effect,
    Stage,
    Target,
    Technique,
    TechniqueFacts,
    call_parameters,
    ignores_guidance_scale,
    knob,
)
from vivace.machinery.technique.script import Script


class Guidance(Technique):
    name: ClassVar[str] = "guidance"
    summary: ClassVar[str] = "guidance scale"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.SCHEDULE,
        owns="guidance scale",
        same_picture=False,
    )

    scale: float = knob(ge=0, le=100, tune=[1.0, 3.0, 5.0], about="guidance scale; 1 switches it off")
    true_cfg: float | None = knob(
        None, gt=1, le=100, about="scale of guidance with a second call, for models with distilled guidance"
    )

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None:
            return None
        pipeline = type(target.pipe)
        if self.true_cfg is None:
            if not ignores_guidance_scale(target.pipe):
                return None
            return (
                f"this {pipeline.__name__} ignores a guidance scale: its model has neither the input nor guidance"
                + (
                    "; give a true one, guidance(1, true_cfg=4)"
                    if "true_cfg_scale" in call_parameters(target.pipe)
                    else ""
                )
            )
        if "true_cfg_scale" not in call_parameters(target.pipe):
            return (
                f"{pipeline.__name__} takes no true_cfg_scale; models without distilled guidance need only "
                "guidance(scale)"
            )
        return None

    def apply(self, target: Target) -> Effect:
        before = target.model.defaults.get("guidance_scale")
        if before == self.scale and self.true_cfg is None:
            raise NoEffect(f"{self.scale:g} is already the workload's guidance scale", already_so=True)
        changed: dict[str, int | float | str] = {"guidance_scale": self.scale}
        if before is not None:
            changed["guidance_scale_before"] = before
        if self.true_cfg is not None:
            changed["true_cfg_scale"] = self.true_cfg
        return Effect(changed=changed, call=self._call())

    def script(self, target: Target) -> Script:
        return Script(call=self._call())

    def _call(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {"guidance_scale": self.scale}
        if self.true_cfg is not None:
            arguments |= {"true_cfg_scale": self.true_cfg, "negative_prompt": ""}
        return arguments
