"""Reuse what a transformer's middle blocks add, while its first blocks show little change; always compute the last.

Why: consecutive denoising steps resemble each other. The first blocks are computed in every step, once, and decide: if
    what they add has changed little since the last computed step, the middle blocks' residual is added again. The last
    blocks are computed in every step as well, on what was reused, to correct it. A hit computes 8 blocks of FLUX's 57,
    14 % of a step's operations; 28 % with `last=8`.
Costs: the image drifts with every hit. The decision reads one number back from the GPU, and a batch is decided as one.
    Kept are what the first blocks add and what the middle ones do (FLUX at 1024 px: 25 MB each per image in bf16; 3 MB
    more for the text with `last`; order 1 doubles the second). The rival is always fewer plain steps: bench both. On
    tiny-flux, of 7 blocks, more first or last ones bring the image no closer at equal hits, while a mask that computes
    the early steps does: 6c1h1c skips 39 % of the steps at SSIM 0.999 (docs/step-curves.md).
Needs: FLUX.1, FLUX.2, SD 3.5, Sana, Z-Image, Qwen-Image (also 2.1), CogView4 or Krea 2. UNets have no chain of blocks.
Source: cache-dit's DBCache and its mask of steps (github.com/vipshop/cache-dit); after ParaAttention's First Block
    Cache. The idea alone: this code is vivace's own.

`first` blocks decide: by default 8, as of FLUX's 57, but no more than a quarter of the model's, and one at least. The
record says how many they are. The first `warmup` steps are computed. No more than `max_consecutive` steps are hits in a
row, and no more than `max_cached` in all. `order` 1 continues the middle residual on a straight line through the last
two computed ones, where 0 repeats it.

`mask` says which steps may be hits, as runs of steps: c is computed, d is decided by the threshold and these limits, h
is a hit. What follows its first run is repeated to the end: of 28 steps mask=4c2h1c computes 12, the first four and
then every third. It begins with c and takes the place of `warmup`. Without d, nothing is left to decide: random weights
take it as trained ones do, and no number is read back. `hits` replaces all that by a fixed schedule: that share of the
steps after the first, evenly spaced.

The decision is made in front of the transformer's forward. `compile` therefore makes graphs without a break: of the
first blocks, and of what follows with and without the middle ones (with a fixed schedule two, of whole steps);
`cuda_graph` captures each.
"""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import model_validator

from vivace.machinery.step_caching.block_residual import unknown_blocks
from vivace.machinery.step_caching.engine import CachedDenoiser, CacheState, IsHit, Look, relative_change
from vivace.machinery.step_caching.split_blocks import num_blocks, split_forwards
from vivace.machinery.step_caching.step_cache import Attached, StepCache, StepDecision
from vivace.machinery.step_caching.what import Taylor
from vivace.machinery.step_caching.when import COMPUTED, DECIDED, HIT, of_step, steps_of
from vivace.machinery.technique import Target, Trait, knob

_FIRST = 8
_LARGEST_SHARE = 4
"""`first` is by default at most one block in this number."""


class DualBlockCache(StepCache):
    name: ClassVar[str] = "dual_block_cache"
    summary: ClassVar[str] = "reuse a transformer's middle blocks; the first decide, the last correct"
    replaced: ClassVar[tuple[str, ...]] = ("threshold", "warmup", "max_cached", "max_consecutive", "mask")
    replaced_in_words: ClassVar[str] = "a threshold (with its limits) and mask"
    compared: ClassVar[str] = "what the first blocks add"
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.KEEPS_BLOCK_TENSORS})

    threshold: float = knob(
        0.1,
        ge=0,
        le=10,
        tune=[0.05, 0.1, 0.2, 0.3],
        about="relative change of what the first blocks add below which a step is a hit",
    )
    first: int | None = knob(
        None, ge=1, le=1000, about="blocks that decide; by default 8, and at most a quarter of the model's"
    )
    last: int = knob(0, ge=0, le=1000, tune=[0, 1], about="blocks at the end that are always computed")
    warmup: int = knob(3, ge=1, le=1000, tune=[3], about="steps at the beginning that are computed")
    max_cached: int | None = knob(None, ge=1, le=1000, about="hits in all")
    max_consecutive: int | None = knob(None, ge=1, le=1000, about="hits in a row")
    mask: str | None = knob(
        None, about="runs of steps: computed (c), decided (d) or hits (h), such as 4c2h1c"
    )
    order: int = knob(0, ge=0, le=1, tune=[0, 1], about="1 continues the residual on a line; 0 repeats it")

    @model_validator(mode="after")
    def _knobs_go_together(self) -> Self:
        if self.mask is None:
            return self
        fields = type(self).model_fields
        idle = ["warmup"]
        if DECIDED not in self.mask:
            idle += ["threshold", "max_cached", "max_consecutive"]
        for name in idle:
            if getattr(self, name) != fields[name].default:
                raise ValueError(f"the mask {self.mask} leaves nothing to {name}; leave {name} out")
        return self

    def unsupported_denoiser(self, target: Target) -> str | None:
        denoiser = target.module("denoiser")
        if (reason := unknown_blocks(denoiser)) is not None:
            return reason
        num = num_blocks(denoiser)
        if self._num_first(num) + self.last >= num:
            return (
                f"{type(denoiser).__name__} has {num} blocks, and {self._num_first(num)} first and {self.last} last "
                f"ones leave none to reuse; take at most {num - 1} in all"
            )
        if "forward" in vars(denoiser):
            return (
                "its forward has been replaced, and the cache would bypass the replacement; apply the recipe to a "
                "pipeline that was just loaded"
            )
        return None

    def attach(self, target: Target, is_hit: IsHit) -> Attached:
        denoiser = target.module("denoiser")
        num = num_blocks(denoiser)
        first = self._num_first(num)
        cached = CachedDenoiser(
            denoiser,
            split_forwards(denoiser, first, self.last),
            is_hit,
            predictor=Taylor(1) if self.order else None,
        )
        blocks = f"{first} first, {num - first - self.last} reused, {self.last} last"
        return Attached(cached.counter, {"denoiser.blocks": blocks, "denoiser.residual_order": self.order})

    def decision(self, target: Target) -> StepDecision:
        mask = "" if self.mask is None else steps_of(self.mask)
        return StepDecision(lambda state, look: self._is_hit(state, look, mask))

    def _is_hit(self, state: CacheState, look: Look, mask: str) -> bool:
        step = state.step
        kind = of_step(mask, step) if mask else COMPUTED if step < self.warmup else DECIDED
        notes = state.notes
        in_all, in_a_row = notes.get("hits", (0, 0))
        is_hit = kind == HIT
        if not is_hit:
            added = look()[0]
            if state.kept and kind == DECIDED and self._is_allowed(in_all, in_a_row):
                is_hit = relative_change(added, notes["added"]) < self.threshold
            if not is_hit:
                notes["added"] = added
        notes["hits"] = (in_all + 1, in_a_row + 1) if is_hit else (in_all, 0)
        return is_hit

    def _is_allowed(self, in_all: int, in_a_row: int) -> bool:
        """Whether another hit would be within the limits."""
        limits = (self.max_cached, in_all), (self.max_consecutive, in_a_row)
        return all(most is None or value < most for most, value in limits)

    def _num_first(self, num: int) -> int:
        return self.first if self.first is not None else max(1, min(_FIRST, num // _LARGEST_SHARE))
