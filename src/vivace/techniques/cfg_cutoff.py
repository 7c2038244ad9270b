"""Classifier-free guidance only for the first part of the steps.

Why: guidance runs the denoiser on two branches, but late steps only add detail to a fixed composition. After the cutoff
    half of the work remains: on an H200 an SDXL step takes about 60 % of the time then (docs/skipped-work.md).
Costs: another image; with an early cutoff it follows the prompt less. If the branches are rows of one batch (SD, SDXL),
    the denoiser gets a second batch size, so `compile` compiles twice (both in the warm-up).
Needs: a pipeline that runs guidance as two rows for each image (SD, SDXL, SD 3.5, Sana, Z-Image, ...) or three
    (InstructPix2Pix), with IP-Adapters, ControlNets and T2I-Adapters or without; or as two calls with cache contexts,
    the conditional one first: Qwen-Image (also 2.1), CogView4, FLUX.2 [klein]'s base models, and FLUX's true CFG,
    `guidance(3.5, true_cfg=4)` or `true_cfg_scale` and a negative prompt in the call. Distilled guidance, as in
    FLUX, is an input of a single call, so nothing can be cut.
Source: Kynkaanniemi et al., Applying Guidance in a Limited Interval, arXiv 2404.07724; the idea of cutting late
    guidance for speed is common in the field.

diffusers' own callbacks keep one row of the prompt embeddings and so fail on batches and on what else has rows. Here
the denoiser's inputs are cut, all of them, and its output is repeated for the other branches: the guided prediction,
uncond + scale * (cond - uncond), is then exactly the conditional one. With two calls, the second one returns the output
of the first. The share is of the steps, of which samplers such as Heun's make two calls each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from vivace.architectures import family_of
from vivace.machinery.guidance import (
    SHOWN,
    CutCalls,
    CutRows,
    GuidanceProgress,
    guides_in_two_calls,
    rows_of,
)
from vivace.machinery.technique import (
    CallContext,
    Effect,
    Stage,
    Target,
    Technique,
    TechniqueFacts,
    call_parameters,
    component_of,
    knob,
)


class CfgCutoff(Technique):
    name: ClassVar[str] = "cfg_cutoff"
    summary: ClassVar[str] = "guidance only for the first part of the steps"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.SCHEDULE,
        owns="guidance schedule",
        same_picture=False,
        belongs_to_pipeline=True,
    )

    fraction: float = knob(gt=0, lt=1, tune=[0.4, 0.6, 0.8], about="share of the steps with guidance")

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None or guides_in_two_calls(target.pipe):
            return None
        rows = rows_of(target.pipe)
        if not isinstance(rows, str):
            return None
        return (
            f"{type(target.pipe).__name__} runs guidance neither as rows of a batch nor as two denoiser calls in cache "
            f"contexts (cond, then uncond), so nothing can be cut: {rows}"
        )

    def apply(self, target: Target) -> Effect:
        progress = GuidanceProgress(target.pipe, self.fraction)
        around: CallContext = progress.around_call
        step_end: Callable[..., dict[str, Any]] | None = None
        inputs: tuple[str, ...] = ()
        if guides_in_two_calls(target.pipe):
            around = CutCalls(target.module("denoiser"), progress).around_call
            name = type(target.pipe).__name__
            never_guided = f"{name} made no unconditional calls: {_how_to_guide(target.pipe)}"
        else:
            rows = rows_of(target.pipe)
            assert not isinstance(rows, str)
            cut = CutRows(target.pipe, rows, progress)
            inputs = _replaceable(target.pipe)
            step_end = cut.step_end if inputs else None
            never_guided = f"guidance was off (scale {_off(target.pipe):g} or less)"
        return Effect(
            changed={"guided_share": self.fraction},
            step_end=step_end,
            step_end_inputs=inputs,
            around=around,
            evidence=progress.evidence,
            refuted=lambda evidence: _refuted(progress.evidence() | evidence, never_guided),
        )


def _off(pipe: Any) -> float:
    """Return the guidance scale at or below which the pipeline does not guide."""
    family = family_of(component_of(pipe, "denoiser"))
    return 1.0 if family is None or family.doubled is None else family.doubled.off


def _replaceable(pipe: Any) -> tuple[str, ...]:
    """Return tensors that a step's callback can replace. In guess mode, ControlNets' pipelines split them."""
    parameters = call_parameters(pipe)
    if "guess_mode" in parameters or "callback_on_step_end" not in parameters:
        return ()
    return tuple(name for name in SHOWN if name in getattr(pipe, "_callback_tensor_inputs", ()))


def _how_to_guide(pipe: Any) -> str:
    if "true_cfg_scale" in call_parameters(pipe):
        return "true CFG needs a scale above 1 and a negative prompt, as set by guidance(3.5, true_cfg=4)"
    return "it guides where the scale is above 1 and the model is not distilled"


def _refuted(counted: dict[str, Any], never_guided: str) -> str | None:
    """Return why nothing was cut, or None. `counted` is the run's evidence."""
    if counted["unguided_steps"] and counted["guided_steps"]:
        return None
    if counted["guided_steps"]:
        return "the cutoff is after the last step, so every step was guided"
    return f"{never_guided}, so there was nothing to cut"
