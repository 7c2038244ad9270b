"""Skip the rest of a transformer when its first block shows that little has changed since the last computed step.

Why: consecutive denoising steps resemble each other. If the first block's residual is close to that of the last
    computed step, the sum of all further blocks' residuals is reused: a hit costs one block of FLUX's 57.
Costs: the image drifts with every hit. The decision reads one number back from the GPU in every step. The rival is
    always fewer plain steps: bench both.
Needs: a transformer that diffusers can cache: FLUX.1, Qwen-Image. UNets have no such blocks.
Source: ParaAttention's First Block Cache (github.com/chengzeyi/ParaAttention), as in diffusers; after TeaCache,
    arXiv 2411.19108.

`hits` replaces the threshold by a fixed schedule: that share of the steps after the first, evenly spaced. It is for
random weights, whose residuals say nothing, and for comparing caches at equal cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vivace.architectures import family_of
from vivace.errors import NoEffect
from vivace.machinery.step_caching.engine import CacheState, IsHit, StepCounter
from vivace.machinery.step_caching.step_cache import Attached, StepCache, StepDecision
from vivace.machinery.technique import CallContext, Component, Target, Trait, knob
from vivace.machinery.technique.pipeline_code import names_its_calls
from vivace.machinery.technique.script import Script, literal

if TYPE_CHECKING:
    import torch


class FirstBlockCache(StepCache):
    name: ClassVar[str] = "first_block_cache"
    summary: ClassVar[str] = "reuse a transformer's later blocks while its first one changes little"
    replaced: ClassVar[tuple[str, ...]] = ("threshold",)
    replaced_in_words: ClassVar[str] = "a threshold"
    compared: ClassVar[str] = "the first block's residual"
    traits: ClassVar[frozenset[Trait]] = frozenset(
        {Trait.DECIDES_ON_HOST, Trait.KEEPS_BLOCK_TENSORS, Trait.MIXES_ROWS}
    )

    threshold: float = knob(
        0.05,
        ge=0,
        le=10,
        tune=[0.05, 0.1, 0.2, 0.3],
        about="relative change of the first block's residual below which a step is a hit",
    )

    def unsupported_denoiser(self, target: Target) -> str | None:
        denoiser = target.module("denoiser")
        kind, family = type(denoiser), family_of(denoiser)
        if family is not None and family.not_by_diffusers:
            return f"diffusers does not cache the blocks of {family.name}: {family.not_by_diffusers}"
        if not hasattr(kind, "enable_cache"):
            return f"{kind.__name__} has no chain of transformer blocks that could be cached"
        return None

    def decision(self, target: Target) -> StepDecision:
        return StepDecision(lambda _, is_close: bool(is_close()))

    def attach(self, target: Target, is_hit: IsHit) -> Attached:
        """Enable diffusers' own cache, and let it call `is_hit`, which can check whether the residual is close."""
        import torch
        from diffusers.hooks import FirstBlockCacheConfig

        denoiser = target.module("denoiser")
        denoiser.enable_cache(FirstBlockCacheConfig(threshold=self.threshold))
        hook = next(
            (deciding for block in denoiser.modules() if (deciding := _deciding_hook(block)) is not None),
            None,
        )
        if hook is None:
            raise NoEffect("diffusers attached no cache to this transformer")
        counter = StepCounter()
        is_far = hook._should_compute_remaining_blocks

        def should_compute(residual: torch.Tensor) -> bool:
            # diffusers makes a new state for each call of the pipeline, and two where guidance takes two calls.
            of_diffusers = hook.state_manager.get_state()
            if not hasattr(of_diffusers, "vivace"):
                of_diffusers.vivace = CacheState()
            state: CacheState = of_diffusers.vivace
            state.step += 1
            # What is kept of another size, which may change within a call, is of no use.
            is_same, state.shape = state.shape in (None, residual.shape), residual.shape
            skip = is_hit(state, lambda: is_same and not is_far(residual)) and is_same
            counter.count(skip)
            return not skip

        hook._should_compute_remaining_blocks = torch.compiler.disable(should_compute)
        return Attached(counter, contexts=_contexts(target.pipe, denoiser))

    def script(self, target: Target) -> Script | None:
        if self.is_fixed or not names_its_calls(target.pipe):
            return None
        config = f"FirstBlockCacheConfig(threshold={literal(self.threshold)})"
        return Script(
            imports=("diffusers:FirstBlockCacheConfig",),
            lines=(f"{target.path('denoiser')}.enable_cache({config})",),
        )


def _contexts(pipe: Any, denoiser: Any) -> dict[Component, CallContext]:
    """Name the context of pipelines that do not tell calls apart: all calls are of one kind."""
    return {} if names_its_calls(pipe) else {"denoiser": lambda: denoiser.cache_context("cond")}


def _deciding_hook(block: torch.nn.Module) -> Any:
    """Return diffusers' hook that decides whether a step is computed, or None if it is not on this block."""
    from diffusers.hooks import HookRegistry
    from diffusers.hooks.first_block_cache import _FBC_LEADER_BLOCK_HOOK

    registry = getattr(block, "_diffusers_hook", None)
    return registry.get_hook(_FBC_LEADER_BLOCK_HOOK) if isinstance(registry, HookRegistry) else None
