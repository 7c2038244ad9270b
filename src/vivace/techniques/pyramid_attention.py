"""Each attention's output reused for some of the middle steps; all else is computed.

Why: what attention adds changes little between neighbouring steps of the middle of a picture's making. A hit leaves out
    every attention of the denoiser with its projections: 42 % of FLUX's operations and 33 % of SDXL's at 1024 px, 26 %
    of SD 1.5's at 512 px. Convolutions, MLPs and modulation are computed as before, so that it harms less than leaving
    out whole blocks, and gains less.
Costs: the picture drifts a little. Every attention's output is kept (FLUX at 1024 px: 1.6 GB a picture in bf16). The
    rival is always fewer plain steps: bench both.
Needs: any denoiser with attention, transformer or UNet.
Source: Zhao et al., Real-Time Video Generation with Pyramid Attention Broadcast, arXiv 2408.12588, as in diffusers. Its
    pyramid, other intervals for self, cross and temporal attention, is for video; here all have one.

Between the timesteps `until` and `start` (of 1000, which count down) every `interval`th step is computed. `hits`
replaces that by a fixed schedule, that share of the steps after the first, evenly spread. Nothing is decided by
content: random weights take it as trained ones do.

It is decided in front of the denoiser's forward: `compile` makes two graphs without a break, and `cuda_graph` records
both.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import model_validator

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
    timestep_of,
)


class PyramidAttention(StepCache):
    name: ClassVar[str] = "pyramid_attention"
    summary: ClassVar[str] = "reuse every attention's output in some of the middle steps"
    replaced: ClassVar[tuple[str, ...]] = ("interval", "start", "until")
    replaced_in_words: ClassVar[str] = "an interval (with start and until)"

    interval: int = knob(2, ge=2, le=100, tune=[2, 3], about="every so many steps attention is computed")
    start: int = knob(800, ge=0, le=1001, tune=[800], about="timestep below which it begins")
    until: int = knob(100, ge=-1, le=1000, tune=[100], about="timestep above which it goes on")
    hits: float | None = hits_knob("an interval")

    @model_validator(mode="after")
    def _knobs_go_together(self) -> Self:
        if self.start <= self.until:
            raise ValueError(
                f"timesteps count down, so start ({self.start}) must be above until ({self.until})"
            )
        return self

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None:
            return None
        denoiser = target.module("denoiser")
        if "return_dict" not in inspect.signature(type(denoiser).forward).parameters or not _attentions(
            denoiser
        ):
            return f"{type(denoiser).__name__} has no attention of diffusers' whose output could be kept"
        if has_step_cache(denoiser):
            return ONE_AT_A_TIME
        return None

    def apply(self, target: Target) -> Effect:
        pipe, denoiser = target.pipe, target.module("denoiser")
        whole = denoiser.forward
        slots = [_reusable(attention) for attention in _attentions(denoiser)]

        def forward(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
            mode, kept = kwargs.pop(MODE), kwargs.pop(KEPT, ())
            kwargs["return_dict"] = False
            for slot, output in zip(slots, kept, strict=False):  # none in mode "compute"
                slot.kept = output
            output = whole(*args, **kwargs)[0]
            computed = tuple(slot.take() for slot in slots)
            return output, computed if mode == "compute" else ()

        def decide(memory: Memory, _: Look) -> bool:
            if self.hits is not None:
                return is_scheduled_hit(memory.step, self.hits)
            in_range = self.until < timestep_of(pipe, memory) < self.start
            return in_range and memory.step % self.interval != 0

        cached = Cached(denoiser, forward, decide, always_compute=not target.model.has_weights)
        return cached.effect(
            {
                "denoiser.pyramid_attention": chosen_by(self.hits, f"interval={self.interval}"),
                "denoiser.reused_attentions": len(slots),
            }
        )

    def script(self, target: Target) -> Script | None:
        denoiser = target.module("denoiser")
        # On a UNet diffusers never starts anew, so a second picture would go on with the first one's.
        if self.hits is not None or not hasattr(type(denoiser), "enable_cache"):
            return None
        if not names_its_context(target.pipe):
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


def _attentions(denoiser: Any) -> list[Any]:
    return [part for part in denoiser.modules() if hasattr(type(part), "set_processor")]


@dataclass
class _Slot:
    """Where an attention's output passes within one forward of the denoiser; empty between forwards."""

    compute: Callable[..., Any]
    kept: Any = None
    computed: Any = None

    def take(self) -> Any:
        computed, self.kept, self.computed = self.computed, None, None
        return computed


def _reusable(attention: Any) -> _Slot:
    """Let an attention hand out what is in its slot, or leave there what it computes."""
    attention._vivace_slot = slot = _Slot(attention.forward)
    # One function for all, which finds its slot by itself, so that blocks that are compiled one code for all stay so.
    attention.forward = types.MethodType(_forward, attention)
    return slot


def _forward(attention: Any, *args: Any, **kwargs: Any) -> Any:
    slot = attention._vivace_slot
    if slot.kept is not None:
        return slot.kept
    slot.computed = slot.compute(*args, **kwargs)
    return slot.computed
