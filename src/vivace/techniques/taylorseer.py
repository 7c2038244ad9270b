"""Predict a denoiser's output from those of the last computed steps, and call it not at all.

Why: over a few steps the output follows a smooth path. From the last computed steps its finite differences are known,
    so that it can be continued as a Taylor series, where other caches only repeat what they kept. A hit costs a sum of
    latents, 0 % of a step.
Costs: the picture drifts with every hit, more so with samplers that add noise at each step (ancestral ones), after
    which there is no smooth path. `order` + 1 outputs are kept in fp32 (FLUX at 1024 px, order 1: 2.1 MB).
    The rival is always fewer plain steps: bench both.
Needs: any denoiser, transformer or UNet.
Source: Liu et al., From Reusable to Forecasting: Accelerating Diffusion Models with TaylorSeers, ICCV 2025, arXiv
    2503.06923; its variant of one series for the last layer, in diffusers use_lite_mode of TaylorSeerCacheConfig.

The first `warmup` steps are computed, then every `interval`th is. `hits` replaces both by a fixed schedule, that share
of the steps after the first, evenly spread. Nothing is decided by content: random weights take it as trained ones do.
`order` 0 repeats the last computed output, 1 continues on a straight line, 2 on a parabola, and so on; each needs one
computed step more, and where there are too few the highest order that they allow is taken.

It is predicted in front of the denoiser's forward, so `compile` makes one graph without a break, and one that hands on.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, ClassVar

from vivace.contract import Effect, Target, knob
from vivace.contract.script import Script, literal, written_call
from vivace.step_caching.step_cache import (
    KEPT,
    MODE,
    ONE_AT_A_TIME,
    Cached,
    Look,
    Memory,
    StepCache,
    chosen_by,
    has_step_cache,
    hits_knob,
    is_scheduled_hit,
    names_its_context,
)


class Taylorseer(StepCache):
    name: ClassVar[str] = "taylorseer"
    summary: ClassVar[str] = "predict a denoiser's output from those of the last computed steps"
    replaced: ClassVar[tuple[str, ...]] = ("interval", "warmup")
    replaced_in_words: ClassVar[str] = "an interval and warmup"
    shares_tokens: ClassVar[bool] = True

    interval: int = knob(3, ge=2, le=100, tune=[2, 3, 4], about="every so many steps one is computed")
    order: int = knob(1, ge=0, le=4, tune=[1, 2], about="of the Taylor series; 0 repeats")
    warmup: int = knob(3, ge=1, le=1000, tune=[3], about="steps at the beginning that are computed")
    hits: float | None = hits_knob("interval and warmup")

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None:
            return None
        denoiser = target.module("denoiser")
        if "return_dict" not in inspect.signature(type(denoiser).forward).parameters:
            return f"what {type(denoiser).__name__} returns is not known to be one prediction a call"
        if has_step_cache(denoiser):
            return ONE_AT_A_TIME
        return None

    def apply(self, target: Target) -> Effect:
        denoiser = target.module("denoiser")
        whole = denoiser.forward

        def forward(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
            mode, kept = kwargs.pop(MODE), kwargs.pop(KEPT, ())
            if mode == "reuse":
                return kept[0], ()
            kwargs["return_dict"] = False
            output = whole(*args, **kwargs)[0]
            return output, (output,)

        def decide(memory: Memory, _: Look) -> bool:
            if self.hits is not None:
                return is_scheduled_hit(memory.step, self.hits)
            return memory.step >= self.warmup and (memory.step - self.warmup - 1) % self.interval != 0

        cached = Cached(
            denoiser,
            forward,
            decide,
            keep=self._continued,
            predict=_predicted,
            always_compute=not target.model.has_weights,
        )
        return cached.effect(
            {
                "denoiser.taylorseer": chosen_by(self.hits, f"interval={self.interval}"),
                "denoiser.taylorseer_order": self.order,
            }
        )

    def _continued(self, memory: Memory, computed: tuple[Any, ...]) -> tuple[Any, ...]:
        """The output and its finite differences up to the order, in fp32, each divided by the steps between."""
        memory.notes["dtype"] = computed[0].dtype
        factors = [computed[0].float()]
        steps = memory.step - memory.notes.get("computed_at", memory.step)
        for before in memory.before[: self.order] if steps else ():
            factors.append((factors[-1] - before) / steps)
        memory.notes["computed_at"] = memory.step
        return tuple(factors)

    def script(self, target: Target) -> Script | None:
        denoiser = target.module("denoiser")
        is_plain = hasattr(type(denoiser), "enable_cache") and names_its_context(target.pipe)
        # diffusers takes differences in the model's own precision.
        if self.hits is not None or not is_plain or str(denoiser.dtype) != "torch.float32":
            return None
        config = written_call(
            "config = TaylorSeerCacheConfig",
            cache_interval=literal(self.interval),
            disable_cache_before_step=literal(self.warmup),
            max_order=literal(self.order),
            taylor_factors_dtype="torch.float32",
            use_lite_mode="True",
        )
        enable = f"{target.path('denoiser')}.enable_cache(config)"
        return Script(
            imports=("torch", "diffusers:TaylorSeerCacheConfig"), lines=(*config.splitlines(), enable)
        )


def _predicted(memory: Memory) -> tuple[Any, ...]:
    offset = memory.step - memory.notes["computed_at"]
    output = sum(factor * (offset**order / math.factorial(order)) for order, factor in enumerate(memory.kept))
    return (output.to(memory.notes["dtype"]),)
