"""Skip a transformer's blocks by a table of how much their residual grows in each step.

Why: the residual of all blocks keeps its direction over neighbouring steps, and the ratio of its magnitude to that of
    the step before is nearly the same for every prompt. It is measured once; while the product of the skipped steps'
    ratios stays near 1, the last residual is added again. A hit computes no block (FLUX.1 has 57; of
    Z-Image it computes the refining ones), and nothing is read back from the GPU.
Costs: the image drifts with every hit. One residual is kept (FLUX at 1024 px: 25 MB per image in bf16). The rival is
    always fewer plain steps: bench both.
Needs: FLUX.1, FLUX.2, SD 3.5, Sana, Z-Image, Qwen-Image (also 2.1), CogView4 or Krea 2, and a table. That of FLUX.1
    [dev] comes with diffusers, and is used for all models of its architecture. For others `vivace calibrate magcache
    --model M` measures one, keeps it in $VIVACE_CACHE (else ~/.cache/vivace) and reports how much it differs between
    images; it is then preferred to the published one. A fixed schedule needs none.
Source: Ma et al., MagCache: Fast Video Generation with Magnitude-Aware Cache, arXiv 2506.09045; FLUX's ratios as in
    diffusers' FLUX_MAG_RATIOS.

`threshold` bounds the sum of the skipped steps' errors, each the distance of the ratios' product from 1; no more than
`max_skip` steps are skipped in a row, and none in the first `retention` of them. A table for another number of steps
is read at the nearest entries. `hits` replaces all that by a fixed schedule: that share of the steps after the first,
evenly spaced. The table decides, not the weights: with FLUX.1 [dev]'s, random weights hit where trained ones do.

It decides as diffusers' own MagCache does, but in front of the transformer's forward. diffusers' keeps the blocks from
being compiled; here `compile` makes two graphs without a break, and `cuda_graph` captures both.
"""

from __future__ import annotations

from typing import ClassVar

from vivace.errors import Unsupported
from vivace.machinery.step_caching.block_residual import cache_residual, unknown_blocks
from vivace.machinery.step_caching.engine import IsHit, steps_before
from vivace.machinery.step_caching.model_fits import Ratios, find_fit
from vivace.machinery.step_caching.step_cache import Attached, StepCache, StepDecision
from vivace.machinery.step_caching.when import KnownGrowth
from vivace.machinery.technique import Target, Trait, knob


class Magcache(StepCache):
    name: ClassVar[str] = "magcache"
    summary: ClassVar[str] = "skip a transformer's blocks where their residual is known to change little"
    replaced: ClassVar[tuple[str, ...]] = ("threshold", "max_skip", "retention")
    replaced_in_words: ClassVar[str] = "a threshold (with max_skip and retention)"
    compared: ClassVar[str] = "the blocks' residual"
    traits: ClassVar[frozenset[Trait]] = frozenset()

    threshold: float = knob(
        0.06,
        ge=0,
        le=10,
        tune=[0.06, 0.12, 0.24],
        about="sum of the errors of steps skipped in a row",
    )
    max_skip: int = knob(3, ge=1, le=100, tune=[3, 5], about="steps that may be skipped in a row")
    retention: float = knob(
        0.2,
        ge=0,
        le=1,
        tune=[0.1, 0.2],
        about="share of the steps, at the beginning, that are computed",
    )

    def unsupported_denoiser(self, target: Target) -> str | None:
        return unknown_blocks(target.module("denoiser"))

    def unsupported_weights(self, target: Target) -> str | None:
        if find_fit(Ratios, target.module("denoiser"), target.model.name) is not None:
            return None  # for random weights too
        return super().unsupported_weights(target) or _no_ratios(target)

    def attach(self, target: Target, is_hit: IsHit) -> Attached:
        return Attached(cache_residual(target.module("denoiser"), is_hit))

    def decision(self, target: Target) -> StepDecision:
        ratios = find_fit(Ratios, target.module("denoiser"), target.model.name)
        if ratios is None:
            raise Unsupported(f"{self.name}: {_no_ratios(target)}")
        pipe = target.pipe
        is_hit = KnownGrowth(
            ratios.at,
            self.threshold,
            self.max_skip,
            self.retention,
            num_steps=lambda: int(pipe.num_timesteps),
            num_before=lambda: steps_before(pipe),
        )
        return StepDecision(is_hit, {"denoiser.magcache_ratios": ratios.about()})


def _no_ratios(target: Target) -> str:
    name = target.model.name.rpartition("@")[0] or "M"
    return (
        "no table of ratios is known for this model; measure one, once: "
        f"vivace calibrate magcache --model {name}; or give a fixed schedule, magcache(hits=0.5)"
    )
