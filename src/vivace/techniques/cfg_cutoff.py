"""Classifier-free guidance for the first part of the steps only.

Why: guidance runs the denoiser on two branches, but late steps add detail to a composition that is settled. After
    the cutoff half of the work is left: on an H200 a SDXL step of batch 1 costs 54 % of one of batch 2.
Costs: another picture; cut too early, prompts are followed less. Where the two branches are one doubled batch (SD,
    SDXL), the denoiser sees a second batch size, so `compile` compiles twice (both happen in the warm-up).
Needs: a pipeline that runs guidance as a doubled batch, or as two calls that it names to step caches, the conditional
    one first: FLUX's true CFG, `guidance(3.5, true_cfg=4)` or `true_cfg_scale` and a negative prompt in the call. The
    guidance that is distilled into FLUX is an input of one call, of which nothing can be cut.
Source: Kynkaanniemi et al., Applying Guidance in a Limited Interval, arXiv 2404.07724; the idea of cutting late
    guidance for speed is common in the field.

diffusers' own callback keeps one row of the prompt's embeddings and so fails on batches; here the whole conditional
half is kept. Of two calls, the second is answered with what the first gave: the guided prediction,
uncond + scale * (cond - uncond), is then the conditional one exactly. That is decided outside of whatever compiled or
recorded the denoiser, and of step caches, which go on counting the calls that are made.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from vivace.contract import Effect, Stage, Target, Technique, knob

# Tensors that SD and SDXL pipelines hold as [unconditional half, conditional half] while guidance is on.
_DOUBLED = ("prompt_embeds", "add_text_embeds", "add_time_ids")
# The names under which pipelines tell step caches which of two calls it is.
_CONDITIONAL, _UNCONDITIONAL = "cond", "uncond"


class CfgCutoff(Technique):
    name: ClassVar[str] = "cfg_cutoff"
    summary: ClassVar[str] = "guidance only for the first part of the steps"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    owns: ClassVar[str] = "guidance schedule"
    same_picture: ClassVar[bool] = False

    fraction: float = knob(gt=0, lt=1, tune=[0.4, 0.6, 0.8], about="share of the steps that keep guidance")

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None or _guides_in_two_calls(target.pipe):
            return None
        pipeline = type(target.pipe)
        inputs = getattr(target.pipe, "_callback_tensor_inputs", ())
        if "prompt_embeds" not in inputs or not hasattr(pipeline, "do_classifier_free_guidance"):
            return (
                f"{pipeline.__name__} runs guidance neither as a doubled batch nor as two calls of the denoiser that "
                "it names (cond, then uncond), so nothing can be cut"
            )
        return None

    def apply(self, target: Target) -> Effect:
        return (
            self._second_calls(target) if _guides_in_two_calls(target.pipe) else self._doubled_batch(target)
        )

    def _last_guided(self, pipe: Any, step: int) -> bool:
        return step + 1 >= max(1, round(self.fraction * int(pipe.num_timesteps)))

    def _doubled_batch(self, target: Target) -> Effect:
        doubled = tuple(name for name in _DOUBLED if name in target.pipe._callback_tensor_inputs)
        seen = {"guided_steps": 0, "unguided_steps": 0}

        def step_end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if step == 0:
                seen["guided_steps"] = seen["unguided_steps"] = 0
            guided = bool(pipe.do_classifier_free_guidance)
            seen["guided_steps" if guided else "unguided_steps"] += 1
            if not guided or not self._last_guided(pipe, step):
                return {}
            pipe._guidance_scale = 1.0  # what the pipeline itself reads at each step; set anew by each call
            return {name: tensors[name].chunk(2)[1] for name in doubled}

        return Effect(
            changed={"guided_share": self.fraction},
            step_end=step_end,
            step_end_inputs=doubled,
            evidence=lambda: dict(seen),
            refuted=lambda evidence: _refuted(seen | evidence, "guidance was off (scale 1 or less)"),
        )

    def _second_calls(self, target: Target) -> Effect:
        second = _SecondCalls(target.module("denoiser"))
        seen = {"guided_steps": 0, "unguided_steps": 0}

        def step_end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if step == 0:
                seen["guided_steps"] = seen["unguided_steps"] = 0
            seen["guided_steps" if second.ran else "unguided_steps"] += 1
            second.ran = False
            second.left_out = second.left_out or self._last_guided(pipe, step)
            return {}

        return Effect(
            changed={"guided_share": self.fraction},
            step_end=step_end,
            around=second.guided_at_first,
            evidence=lambda: dict(seen),
            refuted=lambda evidence: _refuted(
                seen | evidence,
                f"{type(target.pipe).__name__} made no second, unconditional calls: for true CFG it wants a scale "
                "above 1 and a negative prompt, as guidance(3.5, true_cfg=4) gives it",
            ),
        )


class _SecondCalls:
    """The unconditional calls of a denoiser that guidance calls twice a step: made, or answered with the output of the
    conditional call before.

    Stands where `torch.nn.Module.compile` puts a compiled call: in front of hooks and `forward`, and left out where a
    module is copied or pickled.

    Attributes:
        left_out: whether they are answered.
        ran: whether one was made since this was last set.
    """

    def __init__(self, denoiser: Any) -> None:
        self.left_out = self.ran = False
        self._context: str | None = None
        self._conditional: Any = None
        self._name = denoiser.cache_context
        self._call = denoiser._compiled_call_impl or denoiser._call_impl
        denoiser.cache_context = self._named
        denoiser._compiled_call_impl = self._answered

    @contextmanager
    def guided_at_first(self) -> Iterator[None]:
        """Around a whole call of the pipeline; one that fails leaves nothing behind either."""
        try:
            yield
        finally:
            self.left_out = self.ran = False
            self._conditional = None

    @contextmanager
    def _named(self, name: str, **given: Any) -> Iterator[None]:
        before, self._context = self._context, name
        try:
            with self._name(name, **given):
                yield
        finally:
            self._context = before

    def _answered(self, *args: Any, **kwargs: Any) -> Any:
        if self._context == _UNCONDITIONAL:
            if self.left_out:
                return self._conditional
            self.ran = True
        output = self._call(*args, **kwargs)
        # Not held longer than it may be needed: it is as large as the latents.
        self._conditional = output if self.left_out and self._context == _CONDITIONAL else None
        return output


def _guides_in_two_calls(pipe: Any) -> bool:
    """Whether the pipeline calls its denoiser for the prompt and then for its absence, and says so to step caches."""
    if not hasattr(getattr(pipe, "transformer", None), "cache_context"):
        return False
    code = inspect.getsource(type(pipe).__call__)
    first, second = (code.find(f'cache_context("{name}")') for name in (_CONDITIONAL, _UNCONDITIONAL))
    return 0 <= first < second


def _refuted(counted: dict[str, Any], never_guided: str) -> str | None:
    """Given what was counted; where there is evidence of an earlier run, that: the session may have drawn with other
    steps since."""
    if counted["unguided_steps"] and counted["guided_steps"]:
        return None
    if counted["guided_steps"]:
        return "the cutoff fell on the last step, so every step was guided"
    return f"{never_guided}, so there was nothing to cut"
