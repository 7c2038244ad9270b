"""Skip a transformer's blocks while its input, with the noise filtered out, changes little.

Why: early steps settle coarse structure, late ones detail, and until then a frequency holds mostly noise. A filter lets
    through what belongs to the image at that step's noise level. It is applied to the first block's input, modulated by
    the timestep, and the relative changes of the rest add up over skipped steps. They are comparable across steps
    as they are: no polynomial is fitted, nothing calibrated. A hit computes no block.
Costs: the image drifts with every hit. Each step takes a 2-D FFT of the image's tokens and reads a number back from the
    GPU, and a batch is decided as one. A residual is kept (FLUX at 1024 px: 25 MB per image in bf16; two with order 1),
    and between steps the filtered input in fp32 (50 MB). The rival is always fewer plain steps: bench both. On
    tiny-flux it stays closer to the baseline than the other caches between 1.4x and 2.4x, from 2.5x on it does not
    (docs/step-curves.md).
Needs: FLUX.1, FLUX.2, SD 3.5, Sana, Z-Image, Qwen-Image (also 2.1), CogView4 or Krea 2, with trained weights; a fixed
    schedule takes random ones too. Sana-Sprint's timesteps are angles, not noise levels: only a fixed schedule fits.
Source: Chung et al., SeaCache: Spectral-Evolution-Aware Cache for Accelerating Diffusion Models, CVPR 2026, arXiv
    2602.18993; diffusers' SeaCacheConfig, which is for video and leaves FLUX as it is.

At noise level s the latents are (1 - s) of the image and s of white noise, and an image's power falls with the
frequency f as f^-power: 2 for images, 3 is diffusers' for video. The best linear estimate of the image then multiplies
each frequency by (1 - s) / ((1 - s)^2 + s^2 f^power), with f in cycles per token over both directions of the grid.
This is divided by its mean over all frequencies, so that steps have one scale.

`threshold` is the sum of relative changes at which a step is computed again: its authors show FLUX.1 [dev] at 0.3 and
at 0.6. No more than `max_skip` steps are skipped in a row; the first and the last step are always computed. `order` 1
continues the residual on a straight line through the last two computed ones, where 0 repeats it; `predictor` continues
it as taylorseer's does. `hits` and `mask` replace threshold, max_skip and power by a fixed schedule: that share of the
steps after the first, evenly spaced; or the computed steps, listed.

The decision is made in front of the transformer's forward. `compile` therefore makes graphs without a break: of the
whole forward, of a hit, and of the look at the modulated input; `cuda_graph` captures each. The filter is in none of
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vivace.errors import UsageError
from vivace.machinery.step_caching.block_residual import blocks_of, cache_residual, unknown_blocks
from vivace.machinery.step_caching.engine import CacheState, IsHit, Look, noise_levels, timestep_of
from vivace.machinery.step_caching.step_cache import Attached, StepCache, StepDecision
from vivace.machinery.step_caching.what import PredictorName, predictor_of
from vivace.machinery.step_caching.when import AccumulatedChange
from vivace.machinery.technique import Target, Trait, component_of, knob

if TYPE_CHECKING:
    import torch

_LEAST_SIGNAL = 1e-6
"""The share of the image in the first step, which is all noise: only the mean then passes the filter."""


class Seacache(StepCache):
    name: ClassVar[str] = "seacache"
    summary: ClassVar[str] = "skip a transformer's blocks while its input, less the noise, changes little"
    replaced: ClassVar[tuple[str, ...]] = ("threshold", "max_skip", "power")
    replaced_in_words: ClassVar[str] = "a threshold (with max_skip and power)"
    compared: ClassVar[str] = "the filtered input"
    traits: ClassVar[frozenset[Trait]] = frozenset()

    threshold: float = knob(
        0.3,
        ge=0,
        le=10,
        tune=[0.15, 0.3, 0.6],
        about="sum of filtered changes at which a step is computed again",
    )
    max_skip: int = knob(5, ge=1, le=100, tune=[2, 5], about="steps that may be skipped in a row")
    order: int = knob(0, ge=0, le=1, tune=[0, 1], about="1 continues the residual on a line; 0 repeats it")
    predictor: PredictorName = knob(
        "taylor", new=True, about="what continues the residual: a line (order 1), its average, an exponential"
    )
    power: float = knob(2.0, gt=0, le=10, tune=[2.0], about="by which an image's power falls with frequency")

    def unsupported_denoiser(self, target: Target) -> str | None:
        if not self.is_fixed and target.pipe.scheduler.config.get("prediction_type") == "trigflow":
            return (
                f"the timesteps of its {type(target.pipe.scheduler).__name__} are angles, and tell no noise level to "
                "filter; give a fixed schedule, seacache(hits=0.5)"
            )
        return unknown_blocks(target.module("denoiser"))

    def attach(self, target: Target, is_hit: IsHit) -> Attached:
        predictor = None
        if self.order or self.predictor != "taylor":
            predictor = predictor_of(self.predictor, 1, lambda state: noise_levels(target.pipe, state))
        counter = cache_residual(target.module("denoiser"), is_hit, predictor)
        if self.predictor != "taylor":
            return Attached(counter, {"denoiser.seacache_predictor": self.predictor})
        return Attached(counter, {"denoiser.seacache_order": self.order})

    def decision(self, target: Target) -> StepDecision:
        pipe = target.pipe

        def filtered(state: CacheState, look: Look) -> Any:
            notes = state.notes
            if notes.get("shape") != state.shape:  # it may change within a call
                notes["shape"], notes["grid"] = state.shape, _grid_of(state, component_of(pipe, "denoiser"))
            sigma = timestep_of(pipe, state) / pipe.scheduler.config.num_train_timesteps
            return sea_filtered(look(), notes["grid"], sigma, self.power)

        return StepDecision(
            AccumulatedChange(
                self.threshold, lambda: int(pipe.num_timesteps), seen=filtered, max_skip=self.max_skip
            )
        )


def _grid_of(state: CacheState, denoiser: Any) -> tuple[int, int]:
    """Return the rows and columns of the generated image.

    Raises:
        UsageError: its tokens are not those of a whole image, row by row.
    """
    try:
        return blocks_of(denoiser).grid(denoiser, (state.args, state.inputs))
    except ValueError as error:
        raise UsageError(
            f"seacache: {error}, so there is nothing to filter; give a fixed schedule, seacache(hits=0.5)"
        ) from None


def sea_filtered(tokens: torch.Tensor, grid: tuple[int, int], sigma: float, power: float) -> torch.Tensor:
    """Filter the noise out of image tokens: (batch, tokens, width) to (batch, rows, columns, width) in fp32.

    Args:
        grid: rows and columns; tokens beyond that many are left out.
        sigma: the noise level, 0 to 1.
        power: see the module.
    """
    import torch

    rows, columns = grid
    image = tokens[:, : rows * columns].float().unflatten(1, grid)
    gain = sea_gain(grid, sigma, power).to(image.device)
    spectrum = torch.fft.rfft2(image, dim=(1, 2)) * gain[:, : columns // 2 + 1, None]
    return torch.fft.irfft2(spectrum, s=grid, dim=(1, 2))


def sea_gain(grid: tuple[int, int], sigma: float, power: float) -> torch.Tensor:
    """Return the factor of each frequency of a grid, (rows, columns) in the order of an FFT; their mean is 1."""
    import torch

    rows, columns = (torch.fft.fftfreq(size, dtype=torch.float32) for size in grid)
    noise_to_signal = (rows[:, None] ** 2 + columns[None, :] ** 2) ** (power / 2)
    signal = max(1 - sigma, _LEAST_SIGNAL)
    gain = signal / (signal**2 + sigma**2 * noise_to_signal)
    return gain / gain.mean()
