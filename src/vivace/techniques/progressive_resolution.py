"""Denoise at a lower resolution first, then go on at full size.

Why: early steps settle what is where, and noise hides all detail. At half the size a step has 22 % of SD 1.5's
    operations (512 px), 24 % of SDXL's and 29 % of FLUX's (1024 px); at three quarters 53 to 56 %.
Costs: another image. Models draw well only near the sizes that they were trained at, so the lower size must be one of
    them. The embedded models know one size alone. tiny-sd passes the gate at three quarters of the size for 20 % of the
    steps (9 % less work), and fails it at half the size for 30 %; tiny-flux is unclear at three quarters for 10 %, and
    fails at 20 %. On both, fewer steps are closer to the baseline (docs/step-curves.md). A model of several sizes has
    not been measured. Two sizes are two graphs for `compile` and `cuda_graph` (`max_graphs`), of each way of a step
    cache. The rival is always fewer plain steps: bench both.
Needs: text-to-image with Stable Diffusion, SDXL, SD 3.5, Sana, Z-Image or FLUX.1, and a sampler that keeps no more than
    predictions of earlier steps, which are dropped at the switch: Euler, DPM++ 2M, UniPC, DDIM, ..., not PNDM or Heun.
    Latents that come from an image have its size from the beginning.
Source: Jin et al., Pyramidal Flow Matching, arXiv 2410.05954 (stages of resolution, and the noise between them);
    Hoogeboom et al., simple diffusion, arXiv 2301.11093 (noise levels shifted with the size).

The switch is spectral. Noise is drawn at full size, as always, from the same generators. What a low-resolution image
starts from is its low frequencies, by a discrete cosine transform. At the end of the last low-resolution step, the
prediction of the clean latents is scaled up: its coefficients become the low frequencies of full size. Noise of the
next step's level is added: in the low frequencies the predicted noise, in the others those of the noise drawn at first.
So nothing is drawn besides, and the same seed gives the same image.

An image that is scaled down loses noise sooner than detail: at half the size, the same noise hides half as much. So the
steps at low resolution run at lower noise levels, as flow models are trained to shift them with the size: where the
model's schedule depends on the size, at those of the low size; else each level (noise over image) is multiplied by the
scale. Samplers without a list of levels (DDIM, DDPM, LCM) keep theirs.

FLUX numbers its tokens from 0 at any size. To a model that knows one size, a smaller image is then the upper left of
its own, and objects end up at the other edges. With `positions=stretched` the tokens of the lower resolution lie where
they will be at full size, between the numbers of training. On tiny-flux images are then closer to the baseline's, and
pass the gate no more often.
"""

from __future__ import annotations

import inspect
from typing import ClassVar, Literal

from vivace.machinery.families import family_of_pipeline
from vivace.machinery.resolution.resolution_progress import ATTACHED, LAYOUTS, ResolutionProgress
from vivace.machinery.technique import Effect, Stage, Target, Technique, knob


class ProgressiveResolution(Technique):
    name: ClassVar[str] = "progressive_resolution"
    summary: ClassVar[str] = "the first steps at a lower resolution"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    owns: ClassVar[str] = "resolution"
    same_picture: ClassVar[bool] = False

    scale: float = knob(0.75, ge=0.25, lt=1, tune=[0.75, 0.5], about="of height and width in the first steps")
    until: float = knob(0.2, gt=0, lt=1, tune=[0.2, 0.4], about="share of the steps at the lower resolution")
    positions: Literal["own", "stretched"] = knob(
        "own",
        tune=["own", "stretched"],
        about="FLUX only: the low resolution's tokens count from 0, or lie where they will be at full size",
    )

    @property
    def belongs_to_pipeline(self) -> bool:
        return True

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None:
            return None
        if hasattr(target.pipe, ATTACHED):
            return (
                "this pipeline begins at a lower resolution already; load it again to change scale or share"
            )
        kind = type(target.pipe)
        layout = LAYOUTS.get(kind.__name__)
        if layout == "grid" and self.positions != "own":
            return f"{kind.__name__} gives its denoiser no positions that could be stretched; leave positions out"
        if layout is not None:
            return None
        if (
            family_of_pipeline(kind.__name__) is None
            and "image" in inspect.signature(kind.__call__).parameters
        ):
            return (
                f"{kind.__name__} starts from an image, and its latents have that image's size from the start"
            )
        return f"how {kind.__name__} lays out its latents is not known here; known are {', '.join(LAYOUTS)}"

    def apply(self, target: Target) -> Effect:
        progress = ResolutionProgress(target.pipe, self.scale, self.until, self.positions)
        return Effect(
            changed={"resolution_scale": self.scale, "low_resolution_share": self.until},
            around=progress.reset_around_call,
            evidence=progress.evidence,
            refuted=lambda _: None if progress.num_switches else "no call came to the switch",
            finish=progress.attach,
        )
