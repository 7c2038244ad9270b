"""Classifier-free guidance whose unconditional half is computed in some of the steps only.

Why: guidance runs the denoiser on a doubled batch, and the difference of its halves' outputs changes little between
    steps. A hit computes the conditional half alone, 50 % of a step's operations; the other half is made of it and of
    the difference that was kept. Unlike with `cfg_cutoff`, all steps are guided.
Costs: the picture drifts with every hit, and more of them in a row draw another one. Two latents are kept in fp32 (SDXL
    at 1024 px: 0.5 MB a picture). The rival is always fewer plain steps: bench both.
Needs: a pipeline that runs guidance as a doubled batch (SD, SDXL), and a guidance scale above 1. FLUX has its guidance
    distilled into the model, and its pipelines run true CFG as two calls.
Source: Lv et al., FasterCache: Training-Free Video Diffusion Model Acceleration with High Quality, ICLR 2025, arXiv
    2410.19355. This is its CFG-Cache; its other half, attention blended from the last two computed steps, is left out.

Below the timestep `start` (of 1000, which count down) every `interval`th step is computed whole; few steps want a
smaller interval than the 5 of the paper's videos. `hits` replaces both by a fixed schedule, that share of the steps
after the first, evenly spread. Steps are whole as well in each call's first; where guidance has ended (`cfg_cutoff`)
nothing is split. Nothing is decided by content: random weights take it as trained ones do.

The difference is kept in two bands: low frequencies, up to a fifth of the shorter side of the latents, and the rest.
Early steps settle what is where, so above the timestep `details` the low band counts 1 + `boost` times; from there on,
where details are made, the high band does. diffusers' FasterCacheConfig has the same bands; its weights (1.1) multiply
anew in each hit of a row, and between the timesteps 99 and 301 both of them do.

It is decided in front of the denoiser's forward, and the bands are parted behind it: `compile` makes two graphs without
a break, one of the whole batch and one of half of it, and `cuda_graph` records both.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from vivace.contract import Effect, Target, knob
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
    latents_of,
    starting_anew,
    timestep_of,
)

_NUM_RADII = 5
"""The low band's radius is the shorter side divided by this, as in the paper's code and in diffusers."""


class FasterCache(StepCache):
    name: ClassVar[str] = "faster_cache"
    summary: ClassVar[str] = "compute guidance's unconditional half in some of the steps only"
    replaced: ClassVar[tuple[str, ...]] = ("interval", "start")
    replaced_in_words: ClassVar[str] = "an interval (with start)"
    looks_beyond_rows: ClassVar[bool] = True

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
    hits: float | None = hits_knob("interval and start")

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None:
            return None
        if not _doubles_the_batch(target.pipe):
            return (
                f"{type(target.pipe).__name__} does not run guidance as a doubled batch, so there is no "
                "unconditional half to leave out"
            )
        denoiser = target.module("denoiser")
        if getattr(denoiser.config, "time_cond_proj_dim", None) is not None:
            return f"this {type(denoiser).__name__} takes the guidance scale as an input, and no unconditional half"
        if has_step_cache(denoiser):
            return ONE_AT_A_TIME
        return None

    def apply(self, target: Target) -> Effect:
        pipe, denoiser = target.pipe, target.module("denoiser")
        whole = denoiser.forward
        seen = {"whole_batch_calls": 0, "unguided_calls": 0}

        def forward(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
            mode, kept = kwargs.pop(MODE), kwargs.pop(KEPT, ())
            kwargs["return_dict"] = False
            if mode == "compute":
                output = whole(*args, **kwargs)[0]
                return output, (output,)
            num = latents_of(args, kwargs).shape[0]
            args, kwargs = _conditional((args, kwargs), num)
            output = whole(*args, **kwargs)[0]
            return _both(output, kept[0]), ()

        def is_guided() -> bool:
            # As the pipeline itself asks in each step; without one around the call it has no scale to tell.
            return bool(getattr(pipe, "do_classifier_free_guidance", False))

        def decide(memory: Memory, _: Look) -> bool:
            if self.hits is not None:
                return is_scheduled_hit(memory.step, self.hits)
            # Counted from the last whole step, which need not be one of the schedule's own.
            in_range = bool(memory.kept) and timestep_of(pipe, memory) < self.start
            since: int = (memory.notes["since"] + 1) % self.interval if in_range else 0
            memory.notes["since"] = since
            return since != 0

        def keep(_: Memory, computed: tuple[Any, ...]) -> tuple[Any, ...]:
            guided = is_guided()
            seen["whole_batch_calls" if guided else "unguided_calls"] += 1
            return _bands(_difference(computed[0])) if guided else ()

        def predict(memory: Memory) -> tuple[Any, ...]:
            low, high = memory.kept
            if timestep_of(pipe, memory) >= self.details:
                return ((1 + self.boost) * low + high,)
            return (low + (1 + self.boost) * high,)

        cached = Cached(
            denoiser,
            forward,
            decide,
            keep=keep,
            predict=predict,
            can_reuse=lambda _: is_guided(),
            always_compute=not target.model.has_weights,
        )

        def evidence() -> dict[str, int | float | str]:
            return cached.steps.evidence() | {"half_batch_calls": cached.steps.reused} | seen

        def refuted(found: dict[str, Any]) -> str | None:
            if seen["unguided_calls"] and not seen["whole_batch_calls"]:
                return "guidance was off (scale 1 or less), so there was no unconditional half to leave out"
            return cached.steps.refuted(found)

        return Effect(
            changed={
                "denoiser.faster_cache": chosen_by(self.hits, f"interval={self.interval}"),
                "denoiser.faster_cache_boost": self.boost,
            },
            around=starting_anew(denoiser),
            evidence=evidence,
            refuted=refuted,
        )


def _doubles_the_batch(pipe: Any) -> bool:
    """Whether a pipeline's call puts the unconditional rows before the conditional ones, the same number of both."""
    return hasattr(
        type(pipe), "do_classifier_free_guidance"
    ) and "torch.cat([latents] * 2)" in inspect.getsource(type(pipe).__call__)


def _conditional(given: Any, num: int) -> Any:
    """The arguments' second halves: of tensors with `num` rows, also inside of lists, tuples and dicts."""
    import torch

    if isinstance(given, torch.Tensor):
        return given[num // 2 :] if given.ndim and given.shape[0] == num else given
    if isinstance(given, list | tuple):
        return type(given)([_conditional(one, num) for one in given])
    if isinstance(given, dict):
        return {name: _conditional(one, num) for name, one in given.items()}
    return given


def _difference(output: Any) -> Any:
    """Unconditional minus conditional, in fp32."""
    unconditional, conditional = output.float().chunk(2)
    return unconditional - conditional


def _both(conditional: Any, difference: Any) -> Any:
    """The doubled batch, of its conditional half and the difference."""
    import torch

    unconditional = (conditional.float() + difference).to(conditional.dtype)
    return torch.cat([unconditional, conditional])


def _bands(latents: Any) -> tuple[Any, Any]:
    """Low and high frequencies of (batch, channels, height, width); their sum is what was given.

    Low: within a disk around the mean, in periods over the whole of each side.
    """
    import torch

    height, width = latents.shape[-2:]
    vertical = torch.fft.fftfreq(height, 1 / height, device=latents.device)[:, None]
    horizontal = torch.fft.rfftfreq(width, 1 / width, device=latents.device)
    is_low = vertical**2 + horizontal**2 <= (min(height, width) // _NUM_RADII) ** 2
    low = torch.fft.irfft2(torch.fft.rfft2(latents) * is_low, s=(height, width))
    return low, latents - low
