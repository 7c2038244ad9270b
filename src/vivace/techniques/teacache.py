"""Skip a transformer's blocks while its input, as the step modulates it, changes little.

Why: the first block's input, modulated by the timestep embedding, shows before any block is computed how much a step's
    output will differ from the last one: a polynomial turns the relative change of the one into that of the other. The
    changes of skipped steps add up, so that a slow drift is noticed too. A hit computes no block (FLUX.1 has 57);
    of Z-Image it computes the refining ones.
Costs: the image drifts with every hit. The change is read back from the GPU in every step, and a batch is decided as
    one. One residual is kept (FLUX at 1024 px: 25 MB per image in bf16). The rival is always fewer plain steps: bench
    both.
Needs: FLUX.1, FLUX.2, SD 3.5, Sana, Z-Image, Qwen-Image (also 2.1), CogView4 or Krea 2, and a polynomial. That of
    FLUX.1 [dev] is published, and used for all models of its architecture. For others `vivace calibrate teacache
    --model M` fits one, keeps it in $VIVACE_CACHE (else ~/.cache/vivace) and reports how well it fits; it is then
    preferred to the published one. A fixed schedule needs none.
Source: Liu et al., Timestep Embedding Tells: It's Time to Cache for Video Diffusion Model, CVPR 2025, arXiv 2411.19108;
    FLUX's coefficients: github.com/ali-vilab/TeaCache, TeaCache4FLUX.

`threshold` is the sum of rescaled changes at which a step is computed again: on FLUX.1 [dev] its authors found 1.5x at
0.25, 1.8x at 0.4, 2.0x at 0.6. The first and the last step are always computed. `hits` replaces it by a fixed schedule:
that share of the steps after the first, evenly spaced. It is for random weights, whose changes say nothing, and for
comparing caches at equal cost.

The decision is made in front of the transformer's forward. `compile` therefore makes graphs without a break: of the
whole forward, of a hit, and of the look at the modulated input; `cuda_graph` captures each.
"""

from __future__ import annotations

from typing import ClassVar

from vivace.errors import Unsupported
from vivace.machinery.step_caching.block_residual import cache_residual, unknown_blocks
from vivace.machinery.step_caching.engine import IsHit
from vivace.machinery.step_caching.model_fits import Fit, find_fit
from vivace.machinery.step_caching.step_cache import Attached, StepCache, StepDecision
from vivace.machinery.step_caching.when import AccumulatedChange
from vivace.machinery.technique import Target, Trait, knob


class Teacache(StepCache):
    name: ClassVar[str] = "teacache"
    summary: ClassVar[str] = "skip a transformer's blocks while its modulated input changes little"
    replaced: ClassVar[tuple[str, ...]] = ("threshold",)
    replaced_in_words: ClassVar[str] = "a threshold"
    compared: ClassVar[str] = "the modulated input"
    traits: ClassVar[frozenset[Trait]] = frozenset()

    threshold: float = knob(
        0.25,
        ge=0,
        le=10,
        tune=[0.25, 0.4, 0.6],
        about="sum of rescaled changes at which a step is computed again",
    )

    def unsupported_denoiser(self, target: Target) -> str | None:
        return unknown_blocks(target.module("denoiser"))

    def unsupported_weights(self, target: Target) -> str | None:
        if (reason := super().unsupported_weights(target)) is not None:
            return reason
        return (
            None
            if find_fit(Fit, target.module("denoiser"), target.model.name) is not None
            else _no_fit(target)
        )

    def attach(self, target: Target, is_hit: IsHit) -> Attached:
        return Attached(cache_residual(target.module("denoiser"), is_hit))

    def decision(self, target: Target) -> StepDecision:
        fit = find_fit(Fit, target.module("denoiser"), target.model.name)
        if fit is None:
            raise Unsupported(f"{self.name}: {_no_fit(target)}")

        is_hit = AccumulatedChange(
            self.threshold, lambda: getattr(target.pipe, "num_timesteps", None), rescaled=fit.rescaled
        )
        return StepDecision(is_hit, {"denoiser.teacache_polynomial": fit.about()})


def _no_fit(target: Target) -> str:
    name = target.model.name.rpartition("@")[0] or "M"
    return (
        "no polynomial is known for this model, so its changes cannot be rescaled; fit one, once: "
        f"vivace calibrate teacache --model {name}; or give a fixed schedule, teacache(hits=0.5)"
    )
