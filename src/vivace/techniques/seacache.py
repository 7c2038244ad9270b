"""Skip a FLUX transformer's blocks while what its input holds of the picture, and not of the noise, changes little.

Why: early steps settle coarse structure, late ones detail, and until then a frequency holds mostly noise. A filter lets
    through what belongs to the picture by that step's noise level; the first block's input, modulated by the timestep,
    is filtered by it, and the relative changes of what is left add up over skipped steps. They are comparable across
    steps as they are: no polynomial is fitted, nothing calibrated. A hit computes none of FLUX's 57 blocks.
Costs: the picture drifts with every hit. A 2-D FFT of the image's tokens and a number read back from the GPU in every
    step, and a batch is decided as one. A residual is kept (FLUX at 1024 px: 25 MB a picture in bf16; two with
    order 1), and between steps what was filtered, in fp32 (50 MB). The rival is always fewer plain steps: bench both.
    On tiny-flux it stays closer to the baseline than the other caches between 1.4x and 2.4x, from 2.5x on it does not
    (docs/step-curves.md).
Needs: FLUX with trained weights; a fixed schedule takes random ones too.
Source: Chung et al., SeaCache: Spectral-Evolution-Aware Cache for Accelerating Diffusion Models, CVPR 2026, arXiv
    2602.18993; diffusers' SeaCacheConfig, which is for video and leaves FLUX as it is.

At noise level s the latents are (1 - s) of the picture and s of white noise, and a picture's power falls with the
frequency f as f^-power: 2 for pictures, 3 is diffusers' for video. The best linear estimate of the picture then takes
each frequency times (1 - s) / ((1 - s)^2 + s^2 f^power), with f in cycles a token over both directions of the grid.
This is divided by its mean over all frequencies, so that steps have one scale.

`threshold` is the sum of relative changes at which a step is computed again: its authors show FLUX.1 [dev] at 0.3 and
at 0.6. No more than `max_skip` steps are skipped in a row; the first and the last step are always computed. `order` 1
continues the residual on a straight line through the last two computed ones, where 0 repeats it. `hits` replaces
threshold, max_skip and power by a fixed schedule, that share of the steps after the first, evenly spread.

It is decided in front of the transformer's forward. `compile` therefore makes graphs without a break: of the whole
forward, of a hit, and of the look at the modulated input; `cuda_graph` records each. The filter is in none of them.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vivace.contract import Effect, Target, knob
from vivace.errors import UsageError
from vivace.step_caching.flux_residual import not_flux, residual_forward
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
    relative_change,
    timestep_of,
)

_LEAST_SIGNAL = 1e-6
"""Of the first step, which is noise alone: only the mean then passes the filter."""


class Seacache(StepCache):
    name: ClassVar[str] = "seacache"
    summary: ClassVar[str] = "skip a transformer's blocks while its input, less the noise, changes little"
    replaced: ClassVar[tuple[str, ...]] = ("threshold", "max_skip", "power")
    replaced_in_words: ClassVar[str] = "a threshold (with max_skip and power)"
    shares_tokens: ClassVar[bool] = True

    threshold: float = knob(
        0.3,
        ge=0,
        le=10,
        tune=[0.15, 0.3, 0.6],
        about="sum of filtered changes at which a step is computed again",
    )
    max_skip: int = knob(5, ge=1, le=100, tune=[2, 5], about="steps that may be skipped in a row")
    order: int = knob(0, ge=0, le=1, tune=[0, 1], about="1 continues the residual on a line; 0 repeats it")
    power: float = knob(2.0, gt=0, le=10, tune=[2.0], about="by which a picture's power falls with frequency")
    hits: float | None = hits_knob("a threshold")

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None:
            return None
        denoiser = target.module("denoiser")
        if (reason := not_flux(denoiser)) is not None:
            return reason
        if has_step_cache(denoiser):
            return ONE_AT_A_TIME
        if self.hits is None and target.model.has_weights and target.model.has_random_weights:
            return nothing_learnt("the filtered input", "seacache(hits=0.5)")
        return None

    def apply(self, target: Target) -> Effect:
        pipe, denoiser = target.pipe, target.module("denoiser")

        def decide(memory: Memory, look: Look) -> bool:
            if self.hits is not None:
                return is_scheduled_hit(memory.step, self.hits)
            return self._is_close(memory, look, pipe)

        cached = Cached(
            denoiser,
            residual_forward(denoiser),
            decide,
            keep=_with_slope if self.order else None,
            predict=_continued if self.order else None,
            always_compute=not target.model.has_weights,
        )
        return cached.effect(
            {
                "denoiser.seacache": chosen_by(self.hits, self.threshold),
                "denoiser.seacache_order": self.order,
            }
        )

    def _is_close(self, memory: Memory, look: Look, pipe: Any) -> bool:
        """Whether the changes since the last computed step are below the threshold. Every step is compared with the
        one before, computed or not."""
        notes = memory.notes
        if memory.step + 1 == pipe.num_timesteps:
            notes.clear()  # else it would lie in memory while the VAE decodes
            return False
        if "grid" not in notes:
            notes["grid"] = grid_of(memory.inputs["img_ids"])
        sigma = timestep_of(pipe, memory) / pipe.scheduler.config.num_train_timesteps
        filtered, previous = sea_filtered(look(), notes["grid"], sigma, self.power), notes.get("filtered")
        notes["filtered"] = filtered
        is_hit = False
        if memory.kept and previous is not None and notes["skipped"] < self.max_skip:
            notes["distance"] += relative_change(filtered, previous)
            is_hit = notes["distance"] < self.threshold
        notes["skipped"] = notes["skipped"] + 1 if is_hit else 0
        if not is_hit:
            notes["distance"] = 0.0
        return is_hit


def grid_of(img_ids: Any) -> tuple[int, int]:
    """Rows and columns of the picture that is drawn, of its tokens' ids (tokens, 3): which picture, row, column.

    Tokens of other pictures, which FLUX Kontext is given to edit, follow it.

    Raises:
        UsageError: the ids are of no whole picture, row by row.
    """
    import torch

    ids = (img_ids[0] if img_ids.ndim == 3 else img_ids).detach().cpu().long()
    own = ids[ids[:, 0] == 0]
    rows, columns = (int(own[:, axis].max()) + 1 if len(own) else 0 for axis in (1, 2))
    count = rows * columns
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    if not 0 < count == len(own) or not torch.equal(ids[:count], torch.nn.functional.pad(places, (1, 0))):
        raise UsageError(
            f"seacache: the {len(ids)} image tokens' ids are not those of a picture, row by row, so there is nothing "
            f"to filter; give a fixed schedule, seacache(hits=0.5)"
        )
    return rows, columns


def sea_filtered(tokens: Any, grid: tuple[int, int], sigma: float, power: float) -> Any:
    """Image tokens, less what is noise at a noise level: (batch, tokens, width) to (batch, rows, columns, width), fp32.

    Args:
        grid: rows and columns; tokens behind that many are left out.
        sigma: the noise level, 0 to 1.
        power: see the module.
    """
    import torch

    rows, columns = grid
    picture = tokens[:, : rows * columns].float().unflatten(1, grid)
    gain = sea_gain(grid, sigma, power).to(picture.device)
    spectrum = torch.fft.rfft2(picture, dim=(1, 2)) * gain[:, : columns // 2 + 1, None]
    return torch.fft.irfft2(spectrum, s=grid, dim=(1, 2))


def sea_gain(grid: tuple[int, int], sigma: float, power: float) -> Any:
    """By what each frequency of a grid is multiplied, (rows, columns) in the order of an FFT; its mean is 1."""
    import torch

    rows, columns = (torch.fft.fftfreq(size, dtype=torch.float32) for size in grid)
    noise_to_signal = (rows[:, None] ** 2 + columns[None, :] ** 2) ** (power / 2)
    signal = max(1 - sigma, _LEAST_SIGNAL)
    gain = signal / (signal**2 + sigma**2 * noise_to_signal)
    return gain / gain.mean()


def _with_slope(memory: Memory, computed: tuple[Any, ...]) -> tuple[Any, ...]:
    """The residual and its change a step since the one computed before, if there is one."""
    steps = memory.step - memory.notes.get("computed_at", memory.step)
    memory.notes["computed_at"] = memory.step
    return (*computed, (computed[0] - memory.before[0]) / steps) if memory.before and steps else computed


def _continued(memory: Memory) -> tuple[Any, ...]:
    residual, *slope = memory.kept
    offset = memory.step - memory.notes["computed_at"]
    return (residual + offset * slope[0],) if slope else (residual,)
