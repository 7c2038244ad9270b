"""A published LoRA for inference in a few steps, merged into the model's weights.

Why: an image takes 4 steps instead of 30 or 50. Most of these LoRAs need no guidance, which halves the work per step.
    Merged, the LoRA adds no cost per step.
Costs: another image, with less variety and detail than the full model's; each kind is made for certain numbers of
    steps. The LoRA is downloaded once (Hyper-SD's repository lists 0.27 GB for SD 1.5, 1.39 GB for FLUX.1 [dev]);
    tiny-sd's ships with vivace (0.6 MB).
Needs: a model with a known LoRA of this kind: `vivace models` lists them.
Source: Luo et al., LCM-LoRA, arXiv 2311.05556; Lin et al., SDXL-Lightning, arXiv 2402.13929; Ren et al., Hyper-SD,
    arXiv 2404.13686.

It is merged before any other technique changes the weights, in fp32 with one rounding, so that the result can be
quantised, fused or compiled. Scheduler, steps and guidance become those that it was made for; `scheduler`, `steps` and
`guidance` in the same recipe override them. Fully distilled models (sdxl-turbo, sdxl-lightning-4step, lcm-sdxl) are
separate models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from vivace.architectures.entry import FewSteps, StoredPart
from vivace.machinery.lora.by_diffusers import adds_the_same
from vivace.machinery.lora.read_lora import few_steps_file, merge, read_lora
from vivace.machinery.technique import (
    Effect,
    Stage,
    Target,
    Technique,
    TechniqueFacts,
    knob,
)
from vivace.machinery.technique.script import Script, literal, written_call

_USUAL_STEPS = 4
"""Steps of most of these LoRAs; some are made for 1, 2 or 8."""


class Distilled(Technique):
    name: ClassVar[str] = "distilled"
    summary: ClassVar[str] = "a few-step LoRA, merged into the weights"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.SWAP,
        owns="distillation",
        same_picture=False,
        targetable=("denoiser",),
        default_targets=("denoiser",),
        is_stored=True,
    )

    kind: Literal["lcm", "lightning", "hyper", "turbo"] = knob(
        tune=["lcm", "hyper"], about="the distillation method"
    )
    steps: int | None = knob(
        None, ge=1, le=16, tune=[4], about="denoising steps; None: the usual number of the kind"
    )

    @property
    def facts(self) -> TechniqueFacts:
        return replace(
            self.declared,
            trained_steps=self.steps or _USUAL_STEPS,
        )

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None:
            return None
        if not target.model.distillations:
            return "no few-step LoRA is known for this model"
        of_kind = [
            distillation for distillation in target.model.distillations if distillation.kind == self.kind
        ]
        if not of_kind:
            kinds = sorted({distillation.kind for distillation in target.model.distillations})
            return f"no {self.kind} LoRA is known for this model; use {' or '.join(kinds)}"
        if self._chosen(target.model.distillations) is None:
            steps = sorted({number for distillation in of_kind for number in distillation.steps})
            return f"this model's {self.kind} LoRA is made for {', '.join(map(str, steps))} steps, not for {self.steps}"
        return None

    def apply(self, target: Target) -> Effect:
        chosen = self._chosen(target.model.distillations)
        assert chosen is not None
        effect = self.predict(target)
        if target.model.has_random_weights:  # which a merged LoRA leaves random, and as fast
            effect.changed["lora"] = f"none is merged into random weights; {chosen.where} is as fast"
        else:
            effect.changed["denoiser.merged_layers"] = merge(
                target.pipe, few_steps_file(chosen), chosen.scale
            )
        return effect

    def predict(self, target: Target) -> Effect:
        """Set the LoRA's scheduler; a merged LoRA takes no memory."""
        import diffusers

        chosen = self._chosen(target.model.distillations)
        assert chosen is not None
        changed: dict[str, int | float | str] = {
            "lora": chosen.where,
            "scheduler": chosen.scheduler.class_name,
        }

        kind = getattr(diffusers, chosen.scheduler.class_name)
        target.pipe.register_modules(
            scheduler=kind.from_config(target.pipe.scheduler.config, **chosen.scheduler.overrides)
        )
        return Effect(changed=changed, call=self._call(chosen))

    def script(self, target: Target) -> Script | None:
        chosen = self._chosen(target.model.distillations)
        assert chosen is not None
        file = few_steps_file(chosen)
        if not adds_the_same(target.pipe, file, read_lora(target.pipe, file).layers):
            return None  # the script calls vivace
        load = written_call("pipe.load_lora_weights", *_load_arguments(chosen))
        scale = "" if chosen.scale == 1 else f"lora_scale={chosen.scale:g}"
        settings = {name: literal(value) for name, value in chosen.scheduler.overrides.items()}
        scheduler = written_call(
            f"pipe.scheduler = {chosen.scheduler.class_name}.from_config", "pipe.scheduler.config", **settings
        )
        return Script(
            imports=(f"diffusers:{chosen.scheduler.class_name}",),
            lines=(
                "# Needs peft. The LoRA is merged into the weights, so that it adds no cost per step;",
                "# vivace sums in fp32 and rounds once, so the last bits may differ.",
                *load.splitlines(),
                f"pipe.fuse_lora({scale})",
                "pipe.unload_lora_weights()",
                *scheduler.splitlines(),
            ),
            call=self._call(chosen),
        )

    def call_with(self, known: Sequence[FewSteps]) -> dict[str, Any]:
        """Return the steps and guidance of the LoRA that is chosen of those known; empty if none fits."""
        chosen = self._chosen(known)
        return {} if chosen is None else self._call(chosen)

    def _call(self, chosen: FewSteps) -> dict[str, Any]:
        return {
            "num_inference_steps": self.steps or chosen.steps[0],
            "guidance_scale": chosen.guidance_scale,
            **chosen.call,
        }

    def _chosen(self, known: Sequence[FewSteps]) -> FewSteps | None:
        for distillation in known:
            if distillation.kind == self.kind and (self.steps is None or self.steps in distillation.steps):
                return distillation
        return None


def _load_arguments(few_steps: FewSteps) -> tuple[str, ...]:
    """Return what `pipe.load_lora_weights` takes to load it in a script."""
    lora = few_steps.lora
    if isinstance(lora, StoredPart):
        name, revision = f"weight_name={literal(lora.files[0])}", f"revision={literal(lora.revision)}"
        return literal(lora.repo), name, revision
    folder, _, name = lora.rpartition("/")
    return f"WEIGHTS / {literal(folder)}", f"weight_name={literal(name)}"
