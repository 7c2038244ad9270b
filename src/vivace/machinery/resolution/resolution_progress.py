"""A pipeline whose latents begin at a lower resolution: its latents, schedule, sampler and positions, patched."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vivace.errors import Unsupported, UsageError
from vivace.machinery.families import family_of
from vivace.machinery.resolution.frequencies import resized, stretched
from vivace.machinery.resolution.noise_levels import (
    forget_history,
    level,
    predicted,
    prediction_type,
    scaled_levels,
    shift_of,
    unsupported_sampler,
)
from vivace.machinery.samplers.overridden import Method, override
from vivace.machinery.technique import component_of

if TYPE_CHECKING:
    import torch

LAYOUTS = {
    "StableDiffusionPipeline": "grid",
    "StableDiffusionXLPipeline": "grid",
    "StableDiffusion3Pipeline": "grid",
    "SanaPipeline": "grid",
    "ZImagePipeline": "grid",
    "FluxPipeline": "packed",
}
"""Layouts of latents: (batch, channels, height, width), or packed into tokens (batch, tokens, 4 * channels)."""
ATTACHED = "_progressive_resolution"
"""Attribute of a pipeline that begins at a lower resolution."""


@dataclass
class _Sizes:
    """Rows and columns of latent cells, and the full-size values that a call needs.

    Attributes:
        noise: drawn at full size, of variance 1, (batch, channels, rows, columns).
        ids: positions of the image's tokens at full size; None where the pipeline passes none.
    """

    full: tuple[int, int]
    low: tuple[int, int]
    noise: Any
    ids: Any = None


class ResolutionProgress:
    """Changes a pipeline's latents from the start of its call to its end.

    Attributes:
        num_switches: since it was attached.
    """

    def __init__(self, pipe: Any, scale: float, until: float, positions: str) -> None:
        self.num_switches = 0
        self._positions = positions
        self._pipe = pipe
        self._scale = scale
        self._until = until
        self._is_packed = LAYOUTS[type(pipe).__name__] == "packed"
        self._sizes: _Sizes | None = None
        self._scheduler: Any = None
        self._step = self._num_low = self._num_steps = 0

    def evidence(self) -> dict[str, int]:
        return {
            "low_resolution_steps": self._num_low,
            "full_resolution_steps": self._num_steps - self._num_low,
        }

    @contextmanager
    def reset_around_call(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._sizes = None

    def attach(self) -> None:
        """Patch the pipeline and its scheduler, as instances.

        Raises:
            Unsupported: the sampler cannot go on at another size.
        """
        pipe, scheduler = self._pipe, self._pipe.scheduler
        if (reason := unsupported_sampler(scheduler)) is not None:
            raise Unsupported(f"progressive_resolution: {reason}")
        pipe.prepare_latents = self._preparing(pipe.prepare_latents)
        override(scheduler, "set_timesteps", self._setting)
        override(scheduler, "step", self._stepping)
        self._scheduler = scheduler
        setattr(pipe, ATTACHED, self)
        if self._is_packed:
            # Before all others: step caches look at these arguments.
            pipe.transformer.register_forward_pre_hook(self._with_ids, with_kwargs=True, prepend=True)

    def _preparing(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(prepare)

        @functools.wraps(prepare)
        def prepare_low(*args: Any, **kwargs: Any) -> Any:
            self._check(self._pipe.scheduler)
            made = prepare(*args, **kwargs)
            arguments = signature.bind(*args, **kwargs).arguments
            latents, ids = made if isinstance(made, tuple) else (made, None)
            full = self._cells(latents, arguments["height"], arguments["width"])
            low = self._low(full)
            start = float(getattr(self._pipe.scheduler, "init_noise_sigma", 1.0))
            grid = self._grid(latents, full).float()
            self._sizes = _Sizes(full, low, grid / start, ids)
            begin = self._laid_out(resized(grid, low).to(latents.dtype))
            if ids is None:
                return begin
            own = self._pipe._prepare_latent_image_ids(
                len(latents), low[0] // 2, low[1] // 2, ids.device, ids.dtype
            )
            return begin, stretched(own, full, low) if self._positions == "stretched" else own

        return prepare_low

    def _check(self, scheduler: Any) -> None:
        """Raise Unsupported for another scheduler than the one that switches: latents would stay small."""
        if scheduler is not self._scheduler:
            raise Unsupported(
                "progressive_resolution: the switch to full size belongs to the sampler that the pipeline had when the "
                f"recipe was applied, and this {type(scheduler).__name__} is another or a copy; apply the recipe to a "
                "pipeline that has this sampler, and give other pipelines no copy of a session's"
            )

    def _setting(self, set_timesteps: Method) -> Method:
        signature = inspect.signature(set_timesteps)

        def set_both(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            import torch

            self._check(scheduler)
            set_timesteps(scheduler, *args, **kwargs)
            self._step, self._num_steps = 0, len(scheduler.timesteps)
            self._num_low = min(max(1, round(self._until * self._num_steps)), max(1, self._num_steps - 1))
            num = self._num_low
            shift = signature.bind(scheduler, *args, **kwargs).arguments.get("mu")
            if shift is not None and scheduler.config.get("use_dynamic_shifting") and self._sizes is not None:
                low = scheduler.timesteps, scheduler.sigmas
                ratio = math.prod(self._sizes.full) / math.prod(self._sizes.low)
                set_timesteps(scheduler, *args, **kwargs | {"mu": shift_of(scheduler.config, shift, ratio)})
            elif (levels := scaled_levels(scheduler, self._scale)) is not None:
                low = levels
            else:
                return
            scheduler.timesteps = torch.cat([low[0][:num], scheduler.timesteps[num:]])
            scheduler.sigmas = torch.cat([low[1][:num], scheduler.sigmas[num:]])

        return set_both

    def _stepping(self, step: Method) -> Method:
        def step_or_switch(
            scheduler: Any, model_output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any
        ) -> Any:
            self._check(scheduler)
            stepped = step(scheduler, model_output, timestep, sample, *args, **kwargs)
            self._step += 1
            if self._sizes is None or self._step != self._num_low:
                return stepped
            latents = self._switched(scheduler, self._sizes, model_output, sample)
            self._sizes = _Sizes(self._sizes.full, self._sizes.low, None, self._sizes.ids)
            self.num_switches += 1
            if isinstance(stepped, tuple):
                return (latents, *stepped[1:])
            stepped.prev_sample = latents
            return stepped

        return step_or_switch

    def _switched(self, scheduler: Any, sizes: _Sizes, model_output: Any, sample: Any) -> torch.Tensor:
        """Return the latents at full size and at the next step's noise level, in the place of the sampler's."""
        at, following = (level(scheduler, index) for index in (self._step - 1, self._step))
        output, noisy = (self._grid(tensor, sizes.low).float() for tensor in (model_output, sample))
        image, noise = predicted(prediction_type(scheduler), output, noisy, *at)
        # An orthonormal transform keeps a sum of squares; an image keeps its values, so its sum grows with its size.
        gain = math.sqrt(math.prod(sizes.full) / math.prod(sizes.low))
        coarse = resized(resized(sizes.noise, sizes.low), sizes.full)
        noise = resized(noise, sizes.full) + sizes.noise - coarse
        forget_history(scheduler)
        latents = following[0] * gain * resized(image, sizes.full) + following[1] * noise
        return self._laid_out(latents.to(sample.dtype))

    def _with_ids(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the positions of the image's tokens: the pipeline goes on passing those of the low resolution."""
        sizes = self._sizes
        if sizes is None or sizes.noise is not None:
            return None
        return args, kwargs | {"img_ids": sizes.ids}

    def _cells(self, latents: torch.Tensor, height: int, width: int) -> tuple[int, int]:
        if not self._is_packed:
            return latents.shape[-2], latents.shape[-1]
        side = 2 * int(self._pipe.vae_scale_factor)
        return 2 * (int(height) // side), 2 * (int(width) // side)

    def _low(self, full: tuple[int, int]) -> tuple[int, int]:
        """Return the low size, in whole tokens.

        Raises:
            UsageError: it is no smaller.
        """
        denoiser = component_of(self._pipe, "denoiser")
        family = family_of(denoiser)
        assert family is not None
        cells = family.cells(denoiser)
        rows, columns = (max(1, round(self._scale * side / cells)) * cells for side in full)
        if rows >= full[0] or columns >= full[1]:
            raise UsageError(
                f"progressive_resolution: the image has {full[0]}x{full[1]} latent cells, and {self._scale:g} of them "
                "are no fewer; draw a larger image, or leave the technique out"
            )
        return rows, columns

    def _grid(self, latents: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """Return latents as (batch, channels, rows, columns)."""
        if not self._is_packed:
            return latents
        rows, columns = size
        cells = latents.unflatten(1, (rows // 2, columns // 2)).unflatten(3, (-1, 2, 2))
        return cells.permute(0, 3, 1, 4, 2, 5).reshape(len(latents), -1, rows, columns)

    def _laid_out(self, latents: torch.Tensor) -> torch.Tensor:
        """Reverse `_grid`."""
        if not self._is_packed:
            return latents
        batch, channels, rows, columns = latents.shape
        cells = latents.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 2, 4, 1, 3, 5)
        # A tensor of its own: for a view, compiled code would be made that serves nothing but views.
        return cells.reshape(batch, rows // 2 * (columns // 2), 4 * channels)
