"""Classifier-free guidance for the first part of the steps only.

Why: guidance runs the denoiser on two branches, but late steps add detail to a composition that is settled. After
    the cutoff the batch is halved: on an H200 a SDXL step of batch 1 costs 54 % of one of batch 2.
Costs: another picture; cut too early, prompts are followed less. The denoiser sees a second batch size, so `compile`
    compiles twice (both happen in the warm-up).
Needs: a pipeline that runs guidance as a doubled batch (SD, SDXL). FLUX has its guidance distilled into the model.
Source: Kynkaanniemi et al., Applying Guidance in a Limited Interval, arXiv 2404.07724; the idea of cutting late
    guidance for speed is common in the field.

diffusers' own callback keeps one row of the prompt's embeddings and so fails on batches; here the whole conditional
half is kept.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vivace.spec.technique import Effect, Stage, Target, Technique, knob

# Tensors that SD and SDXL pipelines hold as [unconditional half, conditional half] while guidance is on.
_DOUBLED = ("prompt_embeds", "add_text_embeds", "add_time_ids")


class CfgCutoff(Technique):
    name: ClassVar[str] = "cfg_cutoff"
    summary: ClassVar[str] = "guidance only for the first part of the steps"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    owns: ClassVar[str] = "guidance schedule"
    same_picture: ClassVar[bool] = False

    fraction: float = knob(gt=0, lt=1, tune=[0.4, 0.6, 0.8], about="share of the steps that keep guidance")

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None:
            return None
        inputs = getattr(target.pipe, "_callback_tensor_inputs", ())
        if "prompt_embeds" not in inputs or not hasattr(type(target.pipe), "do_classifier_free_guidance"):
            return f"{type(target.pipe).__name__} does not run guidance as a doubled batch, so nothing can be cut"
        return None

    def apply(self, target: Target) -> Effect:
        doubled = tuple(name for name in _DOUBLED if name in target.pipe._callback_tensor_inputs)
        seen = {"guided_steps": 0, "unguided_steps": 0}

        def step_end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if step == 0:
                seen["guided_steps"] = seen["unguided_steps"] = 0
            guided = bool(pipe.do_classifier_free_guidance)
            seen["guided_steps" if guided else "unguided_steps"] += 1
            if not guided or step + 1 < max(1, round(self.fraction * pipe.num_timesteps)):
                return {}
            pipe._guidance_scale = 1.0  # what the pipeline itself reads at each step; set anew by each call
            return {name: tensors[name].chunk(2)[1] for name in doubled}

        def refuted(evidence: dict[str, Any]) -> str | None:
            # What was gathered before `seen`: the session may have drawn with other steps since.
            counted = seen | evidence
            if counted["unguided_steps"] and counted["guided_steps"]:
                return None
            if counted["guided_steps"]:
                return "the cutoff fell on the last step, so every step was guided"
            return "guidance was off (scale 1 or less), so there was nothing to cut"

        return Effect(
            changed={"guided_share": self.fraction},
            step_end=step_end,
            step_end_inputs=doubled,
            evidence=lambda: dict(seen),
            refuted=refuted,
        )
