"""Compute the unconditional half of classifier-free guidance in some of the steps only.

Why: guidance runs the denoiser on a doubled batch, and the difference between the outputs of its halves changes little
    between steps. A hit computes the conditional half alone, 50 % of a step's operations; the other half is made of it
    and of the difference that was kept. Unlike with `cfg_cutoff`, all steps are guided.
Costs: the image drifts with every hit, and more of them in a row make another one. Two latents are kept in fp32 (SDXL
    at 1024 px: 0.5 MB per image). The rival is always fewer plain steps: bench both.
Needs: a pipeline that runs guidance as a doubled batch (SD, SDXL), and a guidance scale above 1. FLUX has its guidance
    distilled into the model, and its pipelines run true CFG as two calls.
Source: Lv et al., FasterCache: Training-Free Video Diffusion Model Acceleration with High Quality, ICLR 2025, arXiv
    2410.19355. This is its CFG-Cache; its other half, attention blended from the last two computed steps, is left out.

Below the timestep `start` (of 1000, counting down) every `interval`th step is computed whole; few steps want a smaller
interval than the 5 of the paper's videos. `hits` replaces both by a fixed schedule: that share of the steps after the
first, evenly spaced. The first step of each call is whole as well; where guidance has ended (`cfg_cutoff`) nothing is
split. The decision does not depend on content: random weights take it as trained ones do.

The difference is kept in two bands: low frequencies, up to a fifth of the shorter side of the latents, and the others.
Early steps settle the layout, so above the timestep `details` the low band counts 1 + `boost` times; below it, where
details are made, the high band does. diffusers' FasterCacheConfig has the same bands; its weights (1.1) multiply again
in each hit of a row, and between the timesteps 99 and 301 both of them do.

The decision is made in front of the denoiser's forward, and the bands are separated behind it: `compile` makes two
graphs without a break, one of the whole batch and one of half of it, and `cuda_graph` captures both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vivace.machinery.guidance import is_cut
from vivace.machinery.step_caching.engine import (
    CachedDenoiser,
    CacheState,
    IsHit,
    StepCounter,
    StepForwards,
    Tensors,
    latents_of,
    timestep_of,
)
from vivace.machinery.step_caching.step_cache import Attached, StepCache, StepDecision
from vivace.machinery.step_caching.when import since_computed
from vivace.machinery.technique import Target, Trait, knob
from vivace.machinery.technique.pipeline_code import doubles_latents

if TYPE_CHECKING:
    import torch

_NUM_RADII = 5
"""The low band's radius is the shorter side divided by this, as in the paper's code and in diffusers."""


class FasterCache(StepCache):
    name: ClassVar[str] = "faster_cache"
    summary: ClassVar[str] = "compute guidance's unconditional half in some of the steps only"
    replaced: ClassVar[tuple[str, ...]] = ("interval", "start")
    replaced_in_words: ClassVar[str] = "an interval (with start)"
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.KEEPS_BLOCK_TENSORS, Trait.MIXES_ROWS})

    interval: int = knob(
        2, ge=2, le=100, tune=[2, 3, 5], about="every so many steps both halves are computed"
    )
    start: int = knob(641, ge=0, le=1001, tune=[641, 801, 1001], about="timestep below which it begins")
    details: int = knob(
        301,
        ge=0,
        le=1001,
        tune=[301],
        about="timestep below which the high band counts more, above it the low one",
    )
    boost: float = knob(0.1, ge=0, le=1, tune=[0.0, 0.1, 0.2], about="how much more")

    def unsupported_denoiser(self, target: Target) -> str | None:
        if not doubles_latents(target.pipe):
            return (
                f"{type(target.pipe).__name__} does not run guidance as a doubled batch, so there is no "
                "unconditional half to leave out"
            )
        denoiser = target.module("denoiser")
        if getattr(denoiser.config, "time_cond_proj_dim", None) is not None:
            return f"this {type(denoiser).__name__} takes the guidance scale as an input, and no unconditional half"
        return None

    def attach(self, target: Target, is_hit: IsHit) -> Attached:
        pipe, denoiser = target.pipe, target.module("denoiser")
        whole = denoiser.forward
        counter = _BatchCounter()

        def compute(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
            output = whole(*args, **kwargs)[0]
            return output, (output,)

        def reuse(kept: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
            num = latents_of(args, kwargs).shape[0]
            args, kwargs = _conditional((args, kwargs), num)
            return _both(whole(*args, **kwargs)[0], kept[0])

        def is_guided() -> bool:
            # The pipeline asks the same in each step. Outside of its call there is no scale.
            return bool(getattr(pipe, "do_classifier_free_guidance", False)) and not is_cut(denoiser)

        CachedDenoiser(
            denoiser,
            StepForwards(compute, reuse),
            is_hit,
            predictor=_Bands(pipe, self.details, self.boost, is_guided, counter),
            can_reuse=lambda _: is_guided(),
            counter=counter,
        )
        return Attached(counter, {"denoiser.faster_cache_boost": self.boost})

    def decision(self, target: Target) -> StepDecision:
        return StepDecision(
            since_computed(self.interval, lambda state: timestep_of(target.pipe, state) < self.start)
        )


@dataclass
class _BatchCounter(StepCounter):
    """Also counts the computed calls with guidance and those without."""

    whole_batch_calls: int = 0
    unguided_calls: int = 0

    def evidence(self) -> dict[str, int | float | str]:
        return super().evidence() | {
            "half_batch_calls": self.skipped,
            "whole_batch_calls": self.whole_batch_calls,
            "unguided_calls": self.unguided_calls,
        }

    def refuted(self, evidence: dict[str, Any]) -> str | None:
        if self.unguided_calls and not self.whole_batch_calls:
            return "guidance was off (scale 1 or less), so there was no unconditional half to leave out"
        return super().refuted(evidence)


@dataclass(frozen=True)
class _Bands:
    """Keeps the two bands of guidance's difference, and weights them for a hit."""

    pipe: Any
    details: int
    boost: float
    is_guided: Callable[[], bool]
    counter: _BatchCounter

    def keep(self, _: CacheState, computed: Tensors) -> Tensors:
        guided = self.is_guided()
        self.counter.whole_batch_calls += guided
        self.counter.unguided_calls += not guided
        return _bands(_difference(computed[0])) if guided else ()

    def predict(self, state: CacheState) -> Tensors:
        low, high = state.kept
        if timestep_of(self.pipe, state) >= self.details:
            return ((1 + self.boost) * low + high,)
        return (low + (1 + self.boost) * high,)


def _conditional(value: Any, num: int) -> Any:
    """Return the arguments' second halves: of tensors with `num` rows, also inside lists, tuples and dicts."""
    import torch

    if isinstance(value, torch.Tensor):
        return value[num // 2 :] if value.ndim and value.shape[0] == num else value
    if isinstance(value, list | tuple):
        return type(value)([_conditional(item, num) for item in value])
    if isinstance(value, dict):
        return {name: _conditional(item, num) for name, item in value.items()}
    return value


def _difference(output: torch.Tensor) -> torch.Tensor:
    """Return unconditional minus conditional, in fp32."""
    unconditional, conditional = output.float().chunk(2)
    return unconditional - conditional


def _both(conditional: torch.Tensor, difference: torch.Tensor) -> torch.Tensor:
    """Return the doubled batch, made of its conditional half and the difference."""
    import torch

    unconditional = (conditional.float() + difference).to(conditional.dtype)
    return torch.cat([unconditional, conditional])


def _bands(latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return low and high frequencies of (batch, channels, height, width); they add up to the latents.

    Low: within a disk around the mean, in periods per side.
    """
    import torch

    height, width = latents.shape[-2:]
    vertical = torch.fft.fftfreq(height, 1 / height, device=latents.device)[:, None]
    horizontal = torch.fft.rfftfreq(width, 1 / width, device=latents.device)
    is_low = vertical**2 + horizontal**2 <= (min(height, width) // _NUM_RADII) ** 2
    low = torch.fft.irfft2(torch.fft.rfft2(latents) * is_low, s=(height, width))
    return low, latents - low
