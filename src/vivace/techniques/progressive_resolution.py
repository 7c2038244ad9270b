"""Denoise at a lower resolution first, then go on at full size.

Why: early steps settle what is where, and noise hides all detail. At half the size a step has 22 % of SD 1.5's
    operations (512 px), 24 % of SDXL's and 29 % of FLUX's (1024 px); at three quarters 53 to 56 %.
Costs: another image. Models draw well only near the sizes that they were trained at, so the lower size must be one of
    them. Two sizes are two graphs for `compile` and `cuda_graph`, and for each of a step cache's ways. The rival is
    always fewer plain steps: bench both.
Needs: text-to-image with Stable Diffusion, SDXL, SD 3.5, Sana, Z-Image or FLUX.1, and a sampler that keeps no more than
    predictions of earlier steps, which are dropped at the switch: Euler, DPM++ 2M, UniPC, DDIM, ..., not PNDM or Heun.
    Latents that come from a picture have its size from the beginning.
Source: Jin et al., Pyramidal Flow Matching, arXiv 2410.05954 (stages of resolution, and the noise between them);
    Hoogeboom et al., simple diffusion, arXiv 2301.11093 (noise levels shifted with the size).

The switch is spectral. Noise is drawn at full size, as always, from the same generators. What a low-resolution image
starts from is its low frequencies, by a discrete cosine transform; so the layout follows the same seed. At the end of
the last low-resolution step, the prediction of the clean latents is scaled up: its coefficients become the low
frequencies of full size. Noise of the next step's level is added: in the low frequencies the predicted noise, in the
others those of the noise drawn at first. So nothing is drawn besides, and the same seed gives the same image.

An image that is scaled down loses noise sooner than detail: at half the size, the same noise hides half as much. So the
steps at low resolution run at lower noise levels, as flow models are trained to shift them with the size: where the
model's schedule depends on the size, at those of the low size; else each level (noise over image) is multiplied by the
scale. Samplers without a list of levels (DDIM, DDPM, LCM) keep theirs.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vivace.contract import Effect, Stage, Target, Technique, component_of, knob
from vivace.errors import Unsupported, UsageError
from vivace.families import family_of, family_of_pipeline

if TYPE_CHECKING:
    import torch

_PIPELINES = {
    "StableDiffusionPipeline": "grid",
    "StableDiffusionXLPipeline": "grid",
    "StableDiffusion3Pipeline": "grid",
    "SanaPipeline": "grid",
    "ZImagePipeline": "grid",
    "FluxPipeline": "packed",
}
"""How their latents lie: (batch, channels, height, width), or packed into tokens (batch, tokens, 4 * channels)."""
_HISTORIES = ("ets", "derivatives", "order_list", "noise_sampler", "prev_derivative")
"""What samplers keep of earlier steps, by attribute, and cannot do without amid a schedule."""


class ProgressiveResolution(Technique):
    name: ClassVar[str] = "progressive_resolution"
    summary: ClassVar[str] = "the first steps at a lower resolution"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    owns: ClassVar[str] = "resolution"
    same_picture: ClassVar[bool] = False

    scale: float = knob(0.5, ge=0.25, lt=1, tune=[0.5, 0.75], about="of height and width in the first steps")
    until: float = knob(0.2, gt=0, lt=1, tune=[0.2, 0.4], about="share of the steps at the lower resolution")
    positions: Literal["own", "stretched"] = knob(
        "own",
        tune=["own", "stretched"],
        about="FLUX only: the low resolution's tokens count from 0, or lie where they will be at full size",
    )

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None:
            return None
        kind = type(target.pipe)
        layout = _PIPELINES.get(kind.__name__)
        if layout == "grid" and self.positions != "own":
            return f"{kind.__name__} gives its denoiser no positions that could be stretched; leave positions out"
        if layout is not None:
            return None
        if (
            family_of_pipeline(kind.__name__) is None
            and "image" in inspect.signature(kind.__call__).parameters
        ):
            return f"{kind.__name__} starts from a picture, and its latents have that picture's size from the start"
        return (
            f"how {kind.__name__} lays out its latents is not known here; known are {', '.join(_PIPELINES)}"
        )

    def apply(self, target: Target) -> Effect:
        progress = _Progress(target.pipe, self.scale, self.until, self.positions)
        return Effect(
            changed={"resolution_scale": self.scale, "low_resolution_share": self.until},
            around=progress.reset_around_call,
            evidence=progress.evidence,
            refuted=lambda _: None if progress.num_switches else "no call came to the switch",
            finish=progress.attach,
        )


@dataclass
class _Sizes:
    """Rows and columns of latent cells, and what a call needs of full size.

    Attributes:
        noise: drawn at full size, of variance 1, (batch, channels, rows, columns).
        ids: positions of the image's tokens at full size; None where the pipeline passes none.
    """

    full: tuple[int, int]
    low: tuple[int, int]
    noise: Any
    ids: Any = None


class _Progress:
    """What happens to a pipeline's latents, from the start of its call to its end.

    Attributes:
        num_switches: since it was attached.
    """

    def __init__(self, pipe: Any, scale: float, until: float, positions: str) -> None:
        self.num_switches = 0
        self._positions = positions
        self._pipe = pipe
        self._scale = scale
        self._until = until
        self._is_packed = _PIPELINES[type(pipe).__name__] == "packed"
        self._sizes: _Sizes | None = None
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
        if (reason := _unsupported_sampler(scheduler)) is not None:
            raise Unsupported(f"progressive_resolution: {reason}")
        pipe.prepare_latents = self._preparing(pipe.prepare_latents)
        scheduler.set_timesteps = self._setting(scheduler, scheduler.set_timesteps)
        scheduler.step = self._stepping(scheduler, scheduler.step)
        if self._is_packed:
            # Before all others: step caches look at these arguments.
            pipe.transformer.register_forward_pre_hook(self._with_ids, with_kwargs=True, prepend=True)

    def _preparing(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(prepare)

        @functools.wraps(prepare)
        def prepare_low(*args: Any, **kwargs: Any) -> Any:
            made = prepare(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            latents, ids = made if isinstance(made, tuple) else (made, None)
            full = self._cells(latents, given["height"], given["width"])
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

    def _setting(self, scheduler: Any, set_timesteps: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(set_timesteps)

        @functools.wraps(set_timesteps)
        def set_both(*args: Any, **kwargs: Any) -> None:
            import torch

            set_timesteps(*args, **kwargs)
            self._step, self._num_steps = 0, len(scheduler.timesteps)
            self._num_low = min(max(1, round(self._until * self._num_steps)), max(1, self._num_steps - 1))
            num = self._num_low
            shift = signature.bind(*args, **kwargs).arguments.get("mu")
            if shift is not None and scheduler.config.get("use_dynamic_shifting") and self._sizes is not None:
                low = scheduler.timesteps, scheduler.sigmas
                ratio = math.prod(self._sizes.full) / math.prod(self._sizes.low)
                set_timesteps(*args, **kwargs | {"mu": _shift_of(scheduler.config, shift, ratio)})
            elif (found := _scaled_levels(scheduler, self._scale)) is not None:
                low = found
            else:
                return
            scheduler.timesteps = torch.cat([low[0][:num], scheduler.timesteps[num:]])
            scheduler.sigmas = torch.cat([low[1][:num], scheduler.sigmas[num:]])

        return set_both

    def _stepping(self, scheduler: Any, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def step_or_switch(model_output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
            stepped = step(model_output, timestep, sample, *args, **kwargs)
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

        step_or_switch.__signature__ = inspect.signature(step)  # type: ignore[attr-defined]
        return step_or_switch

    def _switched(self, scheduler: Any, sizes: _Sizes, model_output: Any, sample: Any) -> torch.Tensor:
        """The latents at full size and at the next step's noise level, in the place of those that the sampler made."""
        at, following = (_level(scheduler, index) for index in (self._step - 1, self._step))
        output, noisy = (self._grid(tensor, sizes.low).float() for tensor in (model_output, sample))
        image, noise = _predicted(_prediction_type(scheduler), output, noisy, *at)
        # An orthonormal transform keeps a sum of squares; an image keeps its values, so its sum grows with its size.
        gain = math.sqrt(math.prod(sizes.full) / math.prod(sizes.low))
        coarse = resized(resized(sizes.noise, sizes.low), sizes.full)
        noise = resized(noise, sizes.full) + sizes.noise - coarse
        _forget(scheduler)
        latents = following[0] * gain * resized(image, sizes.full) + following[1] * noise
        return self._laid_out(latents.to(sample.dtype))

    def _with_ids(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The positions of the image's tokens: the pipeline goes on passing those of the low resolution."""
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
        """The low size, in whole tokens.

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
        """Latents as (batch, channels, rows, columns)."""
        if not self._is_packed:
            return latents
        rows, columns = size
        cells = latents.unflatten(1, (rows // 2, columns // 2)).unflatten(3, (-1, 2, 2))
        return cells.permute(0, 3, 1, 4, 2, 5).reshape(len(latents), -1, rows, columns)

    def _laid_out(self, latents: torch.Tensor) -> torch.Tensor:
        """The reverse of `_grid`."""
        if not self._is_packed:
            return latents
        batch, channels, rows, columns = latents.shape
        cells = latents.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 2, 4, 1, 3, 5)
        # A tensor of its own: for a view, compiled code would be made that serves nothing but views.
        return cells.reshape(batch, rows // 2 * (columns // 2), 4 * channels)


def stretched(ids: torch.Tensor, full: tuple[int, int], low: tuple[int, int]) -> torch.Tensor:
    """Return the positions (tokens, 3) of a low resolution's tokens: their centres, counted in tokens of full size."""
    ids = ids.float()
    for axis, (many, few) in enumerate(zip(full, low, strict=True), 1):
        ids[..., axis] = (ids[..., axis] + 0.5) * many / few - 0.5
    return ids


def resized(latents: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Return latents (..., rows, columns) at another size: the same low frequencies of an orthonormal cosine transform.

    White noise keeps its variance. Larger, there are no other frequencies; smaller, they are gone. To keep an image's
    values, multiply by the square root of the ratio of the areas, new to old.
    """
    rows, columns = (
        _resizing(old, new).to(latents) for old, new in zip(latents.shape[-2:], size, strict=True)
    )
    return rows @ latents @ columns.T


def _resizing(old: int, new: int) -> torch.Tensor:
    """The matrix (new, old) from values to low frequencies to values."""
    common = min(old, new)
    return cosines(new)[:common].T @ cosines(old)[:common]


def cosines(size: int) -> torch.Tensor:
    """Return the matrix of the orthonormal discrete cosine transform (DCT-II): a row for each frequency."""
    import torch

    frequencies, places = torch.arange(size, dtype=torch.float64)[:, None], torch.arange(size) + 0.5
    matrix = torch.cos(math.pi / size * frequencies * places) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix


def _predicted(
    kind: str, output: torch.Tensor, sample: torch.Tensor, scale: float, sigma: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The image and the noise, whose sum `scale * image + sigma * noise` the sample is, as the model predicts them."""
    if kind == "flow_prediction":  # the noise minus the image
        return sample - sigma * output, sample + scale * output
    norm = math.hypot(scale, sigma)
    if kind == "v_prediction":  # of a sample of variance 1
        sample, scale, sigma = sample / norm, scale / norm, sigma / norm
        return scale * sample - sigma * output, sigma * sample + scale * output
    if kind == "sample":
        return output, (sample - scale * output) / sigma
    return (sample - sigma * output) / scale, output


def _unsupported_sampler(scheduler: Any) -> str | None:
    """Why a sampler cannot go on at another size, or None."""
    name, instead = (
        type(scheduler).__name__,
        "take another sampler, such as scheduler(euler) or scheduler(dpmpp_2m)",
    )
    if getattr(scheduler, "order", 1) != 1 or any(hasattr(scheduler, kept) for kept in _HISTORIES):
        return f"{name} needs what it kept of earlier steps, which has the lower resolution; {instead}"
    known = hasattr(scheduler, "alphas_cumprod") or _is_flow(scheduler)
    if not known or hasattr(scheduler, "precondition_outputs"):
        return f"the noise levels of {name} are not known here; {instead}"
    return None


def _prediction_type(scheduler: Any) -> str:
    return str(scheduler.config.get("prediction_type", "flow_prediction"))


def _is_flow(scheduler: Any) -> bool:
    return _prediction_type(scheduler) == "flow_prediction"


def _level(scheduler: Any, step: int) -> tuple[float, float]:
    """The factors of image and noise in the latents that a step begins with."""
    sigmas = getattr(scheduler, "sigmas", None)
    if sigmas is None or len(sigmas) != len(scheduler.timesteps) + 1:
        image = (
            float(scheduler.alphas_cumprod[int(scheduler.timesteps[step])])
            if step < len(scheduler.timesteps)
            else 1.0
        )
        return math.sqrt(image), math.sqrt(1 - image)
    sigma = float(sigmas[step])
    if _is_flow(scheduler):
        return 1 - sigma, sigma
    # Euler's latents are the image plus noise; those of the others have variance 1.
    norm = 1.0 if float(scheduler.init_noise_sigma) != 1.0 else math.hypot(1.0, sigma)
    return 1 / norm, sigma / norm


def _shift_of(config: Any, shift: float, ratio: float) -> float:
    """The shift of full size, which grows with the number of tokens in a straight line, given that of a low size."""
    least, most = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    slope = (config.get("max_shift", 1.15) - config.get("base_shift", 0.5)) / (most - least)
    offset = config.get("base_shift", 0.5) - slope * least
    return float(offset + (shift - offset) * ratio)


def _scaled_levels(scheduler: Any, scale: float) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Timesteps and sigmas with each noise level, noise over image, multiplied; None where there are no sigmas."""

    timesteps, sigmas = scheduler.timesteps, getattr(scheduler, "sigmas", None)
    if sigmas is None or len(sigmas) != len(timesteps) + 1:
        return None
    if _is_flow(scheduler):
        scaled = scale * sigmas / (1 - sigmas + scale * sigmas)
        of_training = scaled[:-1] * scheduler.config.num_train_timesteps
    else:
        scaled = scale * sigmas
        known = ((1 - scheduler.alphas_cumprod) / scheduler.alphas_cumprod).sqrt().log().to(sigmas)
        of_training = _interpolated(scaled[:-1].log(), known)
    if not timesteps.is_floating_point():
        of_training = of_training.round()
    return of_training.to(timesteps), scaled


def _interpolated(values: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """The places, in whole and broken numbers, of values in a list that grows."""
    import torch

    above = torch.searchsorted(known, values).clamp(1, len(known) - 1)
    low, high = known[above - 1], known[above]
    return (above - 1 + ((values - low) / (high - low)).clamp(0, 1)).to(values)


def _forget(scheduler: Any) -> None:
    """Drop a solver's earlier predictions, so that it goes on as at its first step."""
    if hasattr(scheduler, "model_outputs"):
        scheduler.model_outputs = [None] * len(scheduler.model_outputs)
        scheduler.lower_order_nums = 0
    if hasattr(scheduler, "last_sample"):
        scheduler.last_sample = None
