"""Skip the rest of a transformer when its first block says that little has changed since the last full step.

Why: consecutive denoising steps resemble each other. If the first block's residual is close to that of the last
    computed step, the sum of all further blocks' residuals is reused: a hit costs one block of FLUX's 57.
Costs: the picture drifts with every hit. Deciding reads one number back from the GPU in every step. The rival is
    always fewer plain steps: bench both.
Needs: a transformer that diffusers can cache (FLUX and its like); UNets have no such blocks.
Source: ParaAttention's First Block Cache (github.com/chengzeyi/ParaAttention), as in diffusers; after TeaCache,
    arXiv 2411.19108.

`hits` replaces the threshold by a fixed schedule, that share of the steps after the first, evenly spread. It is for
random weights, whose residuals say nothing, and for comparing caches at equal cost.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vivace.contract import Effect, Target, knob
from vivace.contract.script import Script, literal
from vivace.errors import NoEffect
from vivace.step_caching.step_cache import (
    ONE_AT_A_TIME,
    StepCache,
    Steps,
    chosen_by,
    contexts_for,
    has_step_cache,
    hits_knob,
    is_scheduled_hit,
    names_its_context,
    nothing_learnt,
    starting_anew,
)


class FirstBlockCache(StepCache):
    name: ClassVar[str] = "first_block_cache"
    summary: ClassVar[str] = "reuse a transformer's later blocks while its first one changes little"
    replaced: ClassVar[tuple[str, ...]] = ("threshold",)
    replaced_in_words: ClassVar[str] = "a threshold"
    looks_beyond_rows: ClassVar[bool] = True

    threshold: float = knob(
        0.05,
        ge=0,
        le=10,
        tune=[0.05, 0.1, 0.2, 0.3],
        about="relative change of the first block's residual below which a step is a hit",
    )
    hits: float | None = hits_knob("a threshold")

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None:
            return None
        denoiser = target.module("denoiser")
        if not hasattr(type(denoiser), "enable_cache"):
            return f"{type(denoiser).__name__} has no chain of transformer blocks that could be cached"
        if has_step_cache(denoiser):
            return ONE_AT_A_TIME
        if target.model.has_random_weights and self.hits is None:
            return nothing_learnt("the first block's residual", "first_block_cache(hits=0.5)")
        return None

    def apply(self, target: Target) -> Effect:
        import torch
        from diffusers.hooks import FirstBlockCacheConfig, HookRegistry

        denoiser = target.module("denoiser")
        denoiser.enable_cache(FirstBlockCacheConfig(threshold=self.threshold))
        hook = next(
            (found for block in denoiser.modules() if (found := _leader(HookRegistry, block)) is not None),
            None,
        )
        if hook is None:
            raise NoEffect("diffusers attached no cache to this transformer")
        steps = Steps()
        by_threshold = hook._should_compute_remaining_blocks

        def decide(residual: Any) -> bool:
            state = hook.state_manager.get_state()  # anew in each call; guidance in two calls has two
            state.step = getattr(state, "step", -1) + 1
            if not target.model.has_weights:
                compute = True  # nothing to compare; a computed step stores all that the cache can hold
            elif self.hits is None:
                compute = bool(by_threshold(residual))
            else:
                compute = not is_scheduled_hit(state.step, self.hits)
            steps.count(not compute)
            return compute

        hook._should_compute_remaining_blocks = torch.compiler.disable(decide)
        return Effect(
            changed={"denoiser.first_block_cache": chosen_by(self.hits, self.threshold)},
            contexts=contexts_for(target.pipe, denoiser),
            around=starting_anew(denoiser),
            evidence=steps.evidence,
            refuted=steps.refuted,
        )

    def script(self, target: Target) -> Script | None:
        if self.hits is not None or not names_its_context(target.pipe):
            return None
        config = f"FirstBlockCacheConfig(threshold={literal(self.threshold)})"
        return Script(
            imports=("diffusers:FirstBlockCacheConfig",),
            lines=(f"{target.path('denoiser')}.enable_cache({config})",),
        )


def _leader(registry_class: Any, block: Any) -> Any:
    """The hook that decides, if it sits on this block."""
    from diffusers.hooks.first_block_cache import _FBC_LEADER_BLOCK_HOOK

    registry = getattr(block, "_diffusers_hook", None)
    return registry.get_hook(_FBC_LEADER_BLOCK_HOOK) if isinstance(registry, registry_class) else None
