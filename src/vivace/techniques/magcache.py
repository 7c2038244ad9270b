"""Skip a FLUX transformer's blocks by a table of how much their residual grows in each step.

Why: the residual of all blocks keeps its direction over neighbouring steps, and the ratio of its magnitude to the last
    step's is nearly the same for every prompt. It is measured once; while the product of the skipped steps' ratios
    stays near 1, the last residual is added again. A hit computes none of FLUX's 57 blocks, and nothing is read back
    from the GPU.
Costs: the picture drifts with every hit. One residual is kept (FLUX at 1024 px: 25 MB a picture in bf16). The rival is
    always fewer plain steps: bench both.
Needs: FLUX, and a table. FLUX.1 [dev]'s comes with diffusers, and is taken for all models of that architecture. For
    others `vivace calibrate magcache --model M` measures one, keeps it in $VIVACE_CACHE (else ~/.cache/vivace) and says
    how much pictures differ in it; it then counts before the published one. A fixed schedule needs none.
Source: Ma et al., MagCache: Fast Video Generation with Magnitude-Aware Cache, arXiv 2506.09045; FLUX's ratios as in
    diffusers' FLUX_MAG_RATIOS.

`threshold` bounds the sum of the skipped steps' errors, each the distance of the ratios' product from 1; no more than
`max_skip` steps are skipped in a row, and none in the first `retention` of them. A table for another number of steps
is read at the nearest places. `hits` replaces all that by a fixed schedule, that share of the steps after the first,
evenly spread. The table decides, not the weights: with FLUX.1 [dev]'s, random weights hit where trained ones do.

It decides as diffusers' own MagCache does, but in front of the transformer's forward: there the blocks are kept from
being compiled, here `compile` makes two graphs without a break, and `cuda_graph` records both.
"""

from __future__ import annotations

from typing import ClassVar

from vivace.contract import Effect, Target, knob
from vivace.step_caching.flux_residual import not_flux, residual_forward
from vivace.step_caching.magcache_ratios import Ratios, find_ratios
from vivace.step_caching.step_cache import (
    ONE_AT_A_TIME,
    Cached,
    Look,
    Memory,
    StepCache,
    chosen_by,
    has_step_cache,
    hits_knob,
    is_scheduled_hit,
    nothing_learnt,
)


class Magcache(StepCache):
    name: ClassVar[str] = "magcache"
    summary: ClassVar[str] = "skip a transformer's blocks where their residual is known to change little"
    replaced: ClassVar[tuple[str, ...]] = ("threshold", "max_skip", "retention")
    replaced_in_words: ClassVar[str] = "a threshold (with max_skip and retention)"
    shares_tokens: ClassVar[bool] = True

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
    hits: float | None = hits_knob("a threshold")

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None:
            return None
        denoiser = target.module("denoiser")
        if (reason := not_flux(denoiser)) is not None:
            return reason
        if has_step_cache(denoiser):
            return ONE_AT_A_TIME
        if (
            self.hits is not None
            or not target.model.has_weights
            or find_ratios(denoiser, target.model.name) is not None
        ):
            return None
        if target.model.has_random_weights:
            return nothing_learnt("the blocks' residual", "magcache(hits=0.5)")
        name = target.model.name.rpartition("@")[0] or "M"
        return (
            "no table of ratios is known for this model; measure one, once: "
            f"vivace calibrate magcache --model {name}; or give a fixed schedule, magcache(hits=0.5)"
        )

    def apply(self, target: Target) -> Effect:
        pipe, denoiser = target.pipe, target.module("denoiser")
        needs_ratios = self.hits is None and target.model.has_weights
        ratios = find_ratios(denoiser, target.model.name) if needs_ratios else None

        def decide(memory: Memory, _: Look) -> bool:
            if ratios is None:
                return self.hits is not None and is_scheduled_hit(memory.step, self.hits)
            return self._is_near(memory, ratios, int(pipe.num_timesteps))

        cached = Cached(
            denoiser, residual_forward(denoiser), decide, always_compute=not target.model.has_weights
        )
        changed: dict[str, int | float | str] = {"denoiser.magcache": chosen_by(self.hits, self.threshold)}
        if ratios is not None:
            changed["denoiser.magcache_ratios"] = ratios.about()
        return cached.effect(changed)

    def _is_near(self, memory: Memory, ratios: Ratios, num_steps: int) -> bool:
        """Whether the last residual, kept through this step too, stays near enough to what it would be."""
        notes = memory.notes
        if memory.step < int(self.retention * num_steps + 0.5):
            return False
        ratio, error, skipped = notes.get("skipped", (1.0, 0.0, 0))
        ratio *= ratios.at(memory.step, num_steps)
        error, skipped = error + abs(1 - ratio), skipped + 1
        is_hit = bool(memory.kept) and error <= self.threshold and skipped <= self.max_skip
        notes["skipped"] = (ratio, error, skipped) if is_hit else (1.0, 0.0, 0)
        return is_hit
