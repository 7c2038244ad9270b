"""Classifier-free guidance only for the first part of the steps.

Why: guidance runs the denoiser on two branches, but late steps only add detail to a fixed composition. After the cutoff
    half of the work remains: on an H200 an SDXL step takes about 60 % of the time then (docs/skipped-work.md).
Costs: another image; with an early cutoff it follows the prompt less. If the two branches are one doubled batch (SD,
    SDXL), the denoiser gets a second batch size, so `compile` compiles twice (both in the warm-up).
Needs: a pipeline that runs guidance as a doubled batch (SD, SDXL, SD 3.5, Sana, Z-Image), or as two calls with cache
    contexts, the conditional one first: Qwen-Image, CogView4, FLUX.2 [klein]'s base models, and FLUX's true
    CFG, `guidance(3.5, true_cfg=4)` or `true_cfg_scale` and a negative prompt in the call. Distilled guidance, as in
    FLUX, is an input of a single call, so nothing can be cut.
Source: Kynkaanniemi et al., Applying Guidance in a Limited Interval, arXiv 2404.07724; the idea of cutting late
    guidance for speed is common in the field.

diffusers' own callback keeps one row of the prompt embeddings and so fails on batches; here the whole conditional half
is kept. With two calls, the second one returns the output of the first: the guided prediction,
uncond + scale * (cond - uncond), is then exactly the conditional one. This happens outside of compiled or captured code
and of step caches, which keep counting the calls that are made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from vivace.contract import Effect, Stage, Target, Technique, component_of, knob
from vivace.families import Doubled, family_of
from vivace.step_caching.technique import guides_in_unnamed_calls

# Names of the cache contexts in which pipelines make the two calls.
_CONDITIONAL, _UNCONDITIONAL = "cond", "uncond"


class CfgCutoff(Technique):
    name: ClassVar[str] = "cfg_cutoff"
    summary: ClassVar[str] = "guidance only for the first part of the steps"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    owns: ClassVar[str] = "guidance schedule"
    same_picture: ClassVar[bool] = False

    fraction: float = knob(gt=0, lt=1, tune=[0.4, 0.6, 0.8], about="share of the steps with guidance")

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None or _guides_in_two_calls(target.pipe):
            return None
        pipeline = type(target.pipe)
        inputs = getattr(target.pipe, "_callback_tensor_inputs", ())
        doubled = _doubled(target.pipe)
        if (
            not {*doubled.tensors[:1]} <= {*inputs}
            or not hasattr(pipeline, "do_classifier_free_guidance")
            or guides_in_unnamed_calls(target.pipe)
        ):
            return (
                f"{pipeline.__name__} runs guidance neither as a doubled batch nor as two denoiser calls in cache "
                "contexts (cond, then uncond), so nothing can be cut"
            )
        return None

    def apply(self, target: Target) -> Effect:
        return (
            self._second_calls(target) if _guides_in_two_calls(target.pipe) else self._doubled_batch(target)
        )

    def _last_guided(self, pipe: Any, step: int) -> bool:
        return step + 1 >= max(1, round(self.fraction * int(pipe.num_timesteps)))

    def _doubled_batch(self, target: Target) -> Effect:
        known = _doubled(target.pipe)
        doubled = tuple(name for name in known.tensors if name in target.pipe._callback_tensor_inputs)
        if known.masks:
            denoiser = target.module("denoiser")
            denoiser.register_forward_pre_hook(_halve_masks(known.masks), with_kwargs=True)
        seen = {"guided_steps": 0, "unguided_steps": 0}

        def step_end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if step == 0:
                seen["guided_steps"] = seen["unguided_steps"] = 0
            guided = bool(pipe.do_classifier_free_guidance)
            seen["guided_steps" if guided else "unguided_steps"] += 1
            if not guided or not self._last_guided(pipe, step):
                return {}
            pipe._guidance_scale = known.off  # the pipeline reads it at each step, and resets it in each call
            rows = tensors[doubled[0]].shape[0] if doubled else 0
            # ControlNet's guess mode does not double the picture.
            return {name: tensors[name].chunk(2)[1] for name in doubled if tensors[name].shape[0] == rows}

        return Effect(
            changed={"guided_share": self.fraction},
            step_end=step_end,
            step_end_inputs=doubled,
            evidence=lambda: dict(seen),
            refuted=lambda evidence: _refuted(
                seen | evidence, f"guidance was off (scale {known.off:g} or less)"
            ),
        )

    def _second_calls(self, target: Target) -> Effect:
        second = _UnconditionalCalls(target.module("denoiser"))
        seen = {"guided_steps": 0, "unguided_steps": 0}

        def step_end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if step == 0:
                seen["guided_steps"] = seen["unguided_steps"] = 0
            seen["guided_steps" if second.ran else "unguided_steps"] += 1
            second.ran = False
            second.skipped = second.skipped or self._last_guided(pipe, step)
            return {}

        return Effect(
            changed={"guided_share": self.fraction},
            step_end=step_end,
            around=second.reset_after_call,
            evidence=lambda: dict(seen),
            refuted=lambda evidence: _refuted(
                seen | evidence,
                f"{type(target.pipe).__name__} made no unconditional calls: {_how_to_guide(target.pipe)}",
            ),
        )


def _doubled(pipe: Any) -> Doubled:
    """How the pipeline doubles its batch; one of no known family is taken for one of Stable Diffusion's."""
    family = family_of(component_of(pipe, "denoiser"))
    if family is not None and family.doubled is not None:
        return family.doubled
    return Doubled(tensors=("prompt_embeds", "add_text_embeds", "add_time_ids", "pooled_prompt_embeds"))


def _halve_masks(names: tuple[str, ...]) -> Callable[..., Any]:
    """A hook that keeps the conditional half of arguments that stay doubled when the batch is single again."""

    def halve(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows = len(args[0] if args else kwargs["hidden_states"])
        halves = {
            name: kwargs[name][rows:]
            for name in names
            if kwargs.get(name) is not None and len(kwargs[name]) == 2 * rows
        }
        return args, kwargs | halves

    return halve


def _how_to_guide(pipe: Any) -> str:
    if "true_cfg_scale" in inspect.signature(type(pipe).__call__).parameters:
        return "true CFG needs a scale above 1 and a negative prompt, as set by guidance(3.5, true_cfg=4)"
    return "it guides where the scale is above 1 and the model is not distilled"


class _UnconditionalCalls:
    """Makes the unconditional call of each step, or returns the output of the conditional call before it instead.

    It takes the slot of `torch.nn.Module.compile`'s compiled call: before hooks and `forward`, and dropped when a
    module is copied or pickled.

    Attributes:
        skipped: whether unconditional calls are skipped.
        ran: whether one was made since this was last reset.
    """

    def __init__(self, denoiser: Any) -> None:
        self.skipped = self.ran = False
        self._context: str | None = None
        self._conditional: Any = None
        self._name = denoiser.cache_context
        self._call = denoiser._compiled_call_impl or denoiser._call_impl
        denoiser.cache_context = self._cache_context
        denoiser._compiled_call_impl = self._call_or_skip

    @contextmanager
    def reset_after_call(self) -> Iterator[None]:
        """Reset the state after each pipeline call, even after an error."""
        try:
            yield
        finally:
            self.skipped = self.ran = False
            self._conditional = None

    @contextmanager
    def _cache_context(self, name: str, **given: Any) -> Iterator[None]:
        before, self._context = self._context, name
        try:
            with self._name(name, **given):
                yield
        finally:
            self._context = before

    def _call_or_skip(self, *args: Any, **kwargs: Any) -> Any:
        if self._context == _UNCONDITIONAL:
            if self.skipped:
                return self._conditional
            self.ran = True
        output = self._call(*args, **kwargs)
        # Kept only while it is needed: it is as large as the latents.
        self._conditional = output if self.skipped and self._context == _CONDITIONAL else None
        return output


def _guides_in_two_calls(pipe: Any) -> bool:
    """Whether the pipeline makes a conditional and then an unconditional denoiser call, in named cache contexts."""
    if not hasattr(getattr(pipe, "transformer", None), "cache_context"):
        return False
    code = inspect.getsource(type(pipe).__call__)
    first, second = (code.find(f'cache_context("{name}")') for name in (_CONDITIONAL, _UNCONDITIONAL))
    return 0 <= first < second


def _refuted(counted: dict[str, Any], never_guided: str) -> str | None:
    """Return why nothing was cut, or None. `counted` is the evidence of the run in question."""
    if counted["unguided_steps"] and counted["guided_steps"]:
        return None
    if counted["guided_steps"]:
        return "the cutoff is after the last step, so every step was guided"
    return f"{never_guided}, so there was nothing to cut"
