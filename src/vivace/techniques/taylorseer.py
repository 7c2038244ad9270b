"""Predict a denoiser's output from those of the last computed steps, without calling it.

Why: over a few steps the output follows a smooth path. The last computed steps give its finite differences, so it can
    be continued as a Taylor series, where other caches only repeat what they kept. A hit costs a sum of latents, 0 % of
    a step.
Costs: the image drifts with every hit, more so with samplers that add noise at each step (ancestral ones), after
    which there is no smooth path. `order` + 1 outputs are kept in fp32 (FLUX at 1024 px, order 1: 2.1 MB).
    The rival is always fewer plain steps: bench both.
Needs: any denoiser, transformer or UNet.
Source: Liu et al., From Reusable to Forecasting: Accelerating Diffusion Models with TaylorSeers, ICCV 2025, arXiv
    2503.06923; its variant of one series for the last layer, in diffusers use_lite_mode of TaylorSeerCacheConfig.

The first `warmup` steps are computed, then every `interval`th is. `hits` replaces both by a fixed schedule: that share
of the steps after the first, evenly spaced. The decision does not depend on content: random weights take it as trained
ones do. `order` 0 repeats the last computed output, 1 continues on a straight line, 2 on a parabola, and so on; each
needs one more computed step, and as long as there are too few the highest order that they allow is used.
`mask` lists the computed steps, as `vivace calibrate schedule` searches them for a number that is given.

`predictor=average_velocity` and `predictor=dmd` continue in another way. The first compares the last computed output
with the average of what the sampler was given between the last two computed steps, and follows the noise level. The
second continues an exponential, whose rate the last three computed outputs tell. Sources: Gao et al., MeanCache: From
Instantaneous to Average Velocity for Accelerating Flow Matching Inference, ICLR 2026, arXiv 2601.19961; Schmid, Dynamic
Mode Decomposition of Numerical and Experimental Data, J. Fluid Mech. 2010, as a predictor in cache-dit. They stand for
what their publishers report of large models; on the embedded ones the interval mostly holds no gain over fewer steps
(docs/step-curves.md), so nothing recommends or tunes them: prove them on your model first.

The prediction is made in front of the denoiser's forward, so `compile` makes one graph without a break, and one that
hands on.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from vivace.architectures import family_of
from vivace.machinery.step_caching.engine import (
    CachedDenoiser,
    CacheState,
    IsHit,
    Look,
    StepForwards,
    latents_of,
    noise_levels,
)
from vivace.machinery.step_caching.step_cache import Attached, StepCache, StepDecision
from vivace.machinery.step_caching.what import PredictorName, predictor_of
from vivace.machinery.technique import Target, Trait, knob
from vivace.machinery.technique.pipeline_code import names_its_calls
from vivace.machinery.technique.script import Script, literal, written_call


class Taylorseer(StepCache):
    name: ClassVar[str] = "taylorseer"
    summary: ClassVar[str] = "predict a denoiser's output from those of the last computed steps"
    replaced: ClassVar[tuple[str, ...]] = ("interval", "warmup")
    replaced_in_words: ClassVar[str] = "an interval and warmup"
    traits: ClassVar[frozenset[Trait]] = frozenset()

    interval: int = knob(3, ge=2, le=100, tune=[2, 3, 4], about="every so many steps one is computed")
    order: int = knob(1, ge=0, le=4, tune=[1, 2], about="of the Taylor series; 0 repeats")
    warmup: int = knob(3, ge=1, le=1000, tune=[3], about="steps at the beginning that are computed")
    predictor: PredictorName = knob(
        "taylor", new=True, about="what continues the outputs: a Taylor series, their average, an exponential"
    )

    def unsupported_denoiser(self, target: Target) -> str | None:
        kind = type(target.module("denoiser"))
        if "return_dict" not in inspect.signature(kind.forward).parameters:
            return f"what {kind.__name__} returns is not known to be one prediction a call"
        scheduler = target.pipe.scheduler
        if self.predictor == "average_velocity" and not (
            hasattr(scheduler, "sigmas") or hasattr(scheduler, "alphas_cumprod")
        ):
            return (
                f"{type(scheduler).__name__} tells no noise levels, which predictor=average_velocity follows"
            )
        return None

    def attach(self, target: Target, is_hit: IsHit) -> Attached:
        import torch

        denoiser = target.module("denoiser")
        whole = denoiser.forward

        def compute(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
            output = whole(*args, **kwargs)[0]
            # Z-Image's is a list of one tensor for each row.
            return output, (torch.stack(output) if isinstance(output, list) else output,)

        def reuse(kept: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
            return list(kept[0].unbind()) if isinstance(latents_of(args, kwargs), list) else kept[0]

        predictor = predictor_of(
            self.predictor, self.order, lambda state: noise_levels(target.pipe, state), in_fp32=True
        )
        cached = CachedDenoiser(denoiser, StepForwards(compute, reuse), is_hit, predictor=predictor)
        if self.predictor != "taylor":
            return Attached(cached.counter, {"denoiser.taylorseer_predictor": self.predictor})
        return Attached(cached.counter, {"denoiser.taylorseer_order": self.order})

    def decision(self, target: Target) -> StepDecision:
        def is_hit(state: CacheState, _: Look) -> bool:
            return state.step >= self.warmup and (state.step - self.warmup - 1) % self.interval != 0

        return StepDecision(is_hit)

    def script(self, target: Target) -> Script | None:
        denoiser, family = target.module("denoiser"), family_of(target.module("denoiser"))
        is_plain = hasattr(type(denoiser), "enable_cache") and names_its_calls(target.pipe)
        if family is not None and family.text_in_first_step_alone:
            return None  # diffusers takes differences of outputs of two lengths
        # diffusers takes differences in the model's own precision.
        if (
            self.is_fixed
            or self.predictor != "taylor"
            or not is_plain
            or str(denoiser.dtype) != "torch.float32"
        ):
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
