"""Reuse each attention's output in some of the middle steps; all else is computed.

Why: what attention adds changes little between neighbouring steps in the middle of the denoising. A hit skips every
    attention of the denoiser with its projections: 42 % of FLUX's operations and 33 % of SDXL's at 1024 px, 26 % of SD
    1.5's at 512 px. Convolutions, MLPs and modulation are computed as before, so it harms less than skipping whole
    blocks, and gains less.
Costs: the image drifts a little. Every attention's output is kept (FLUX at 1024 px: 1.6 GB per image in bf16). The
    rival is always fewer plain steps: bench both.
Needs: any denoiser with attention, transformer or UNet.
Source: Zhao et al., Real-Time Video Generation with Pyramid Attention Broadcast, arXiv 2408.12588, as in diffusers. Its
    pyramid, other intervals for self, cross and temporal attention, is for video; here all have one.

Between the timesteps `until` and `start` (of 1000, counting down) every `interval`th step is computed. `hits` replaces
that by a fixed schedule: that share of the steps after the first, evenly spaced. The decision does not depend on
content: random weights take it as trained ones do.

The decision is made in front of the denoiser's forward: `compile` makes two graphs without a break, and `cuda_graph`
captures both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import model_validator

from vivace.architectures import family_of
from vivace.machinery.step_caching.engine import (
    CachedDenoiser,
    CacheState,
    IsHit,
    Look,
    StepForwards,
    last_tokens,
    timestep_of,
)
from vivace.machinery.step_caching.step_cache import Attached, StepCache, StepDecision
from vivace.machinery.technique import Target, knob
from vivace.machinery.technique.pipeline_code import names_its_calls
from vivace.machinery.technique.script import Script, literal, written_call

if TYPE_CHECKING:
    import torch


class PyramidAttention(StepCache):
    name: ClassVar[str] = "pyramid_attention"
    summary: ClassVar[str] = "reuse every attention's output in some of the middle steps"
    replaced: ClassVar[tuple[str, ...]] = ("interval", "start", "until")
    replaced_in_words: ClassVar[str] = "an interval (with start and until)"

    interval: int = knob(2, ge=2, le=100, tune=[2, 3], about="every so many steps attention is computed")
    start: int = knob(800, ge=0, le=1001, tune=[800], about="timestep below which it begins")
    until: int = knob(100, ge=-1, le=1000, tune=[100], about="timestep above which it goes on")

    @model_validator(mode="after")
    def _knobs_go_together(self) -> Self:
        if self.start <= self.until:
            raise ValueError(
                f"timesteps count down, so start ({self.start}) must be above until ({self.until})"
            )
        return self

    def unsupported_denoiser(self, target: Target) -> str | None:
        denoiser = target.module("denoiser")
        kind = type(denoiser)
        if "return_dict" not in inspect.signature(kind.forward).parameters or not _attentions(denoiser):
            return f"{kind.__name__} has no attention of diffusers' whose output could be kept"
        return None

    def attach(self, target: Target, is_hit: IsHit) -> Attached:
        denoiser = target.module("denoiser")
        whole = denoiser.forward
        attentions = [_ReusableForward(attention) for attention in _attentions(denoiser)]

        def compute(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
            output = whole(*args, **kwargs)[0]
            return output, tuple(attention.take_computed() for attention in attentions)

        def reuse(kept: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
            for attention, output in zip(attentions, kept, strict=True):
                attention.kept = output
            output = whole(*args, **kwargs)[0]
            for attention in attentions:
                attention.kept = None
            return output

        cached = CachedDenoiser(denoiser, StepForwards(compute, reuse), is_hit)
        return Attached(cached.counter, {"denoiser.reused_attentions": len(attentions)})

    def decision(self, target: Target) -> StepDecision:
        def is_hit(state: CacheState, _: Look) -> bool:
            in_range = self.until < timestep_of(target.pipe, state) < self.start
            return in_range and state.step % self.interval != 0

        return StepDecision(is_hit)

    def script(self, target: Target) -> Script | None:
        denoiser = target.module("denoiser")
        # On a UNet diffusers never resets the cache, so a second image would go on with the first one's.
        if self.is_fixed or not hasattr(type(denoiser), "enable_cache"):
            return None
        family = family_of(denoiser)
        if family is not None and family.text_in_first_step_alone:
            return None  # what diffusers keeps of the first step would be too long for the second
        if not names_its_calls(target.pipe):
            return None
        config = written_call(
            "config = PyramidAttentionBroadcastConfig",
            spatial_attention_block_skip_range=literal(self.interval),
            spatial_attention_timestep_skip_range=literal((self.until, self.start)),
            current_timestep_callback="lambda: pipe.current_timestep",
        )
        return Script(
            imports=("diffusers:PyramidAttentionBroadcastConfig",),
            lines=(*config.splitlines(), f"{target.path('denoiser')}.enable_cache(config)"),
        )


def _attentions(denoiser: torch.nn.Module) -> list[torch.nn.Module]:
    return [part for part in denoiser.modules() if hasattr(type(part), "set_processor")]


class _ReusableForward:
    """Replaces an attention's forward, on the instance: returns `kept` if there is any, else notes its own output.

    Both are empty between forwards of the denoiser, so that a graph carries no state.
    """

    def __init__(self, attention: torch.nn.Module) -> None:
        self._whole: Callable[..., Any] = attention.forward
        self.kept: Any = None
        self.computed: Any = None
        # A bound method, since torch.compile takes callable objects for different code in each block.
        attention.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.kept is not None:
            tokens = args[0] if args else kwargs["hidden_states"]
            return last_tokens(self.kept, tokens) if isinstance(self.kept, type(tokens)) else self.kept
        self.computed = self._whole(*args, **kwargs)
        return self.computed

    def take_computed(self) -> Any:
        computed, self.computed = self.computed, None
        return computed
