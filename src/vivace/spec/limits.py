"""What pictures must keep of the baseline's: the limits of the quality gate."""

from __future__ import annotations

from pydantic import Field

from vivace.spec.base import Spec


class Limits(Spec):
    """Smallest allowed means over the pictures of a recipe; None holds nothing to that figure.

    ssim: similarity to the baseline's picture of the same prompt and seed; for recipes wholly of `same_picture`
        techniques.
    psnr_db: likewise, in dB.
    clip: share of the baseline's CLIP margin that is kept; for all other recipes. The margin is how much better the
        baseline's pictures fit their own prompt than other prompts, so that 1 is as good as the baseline and 0 as bad
        as pictures of something else, whatever CLIP model scores them.

    The defaults are justified in docs/quality.md.
    """

    ssim: float | None = Field(default=0.7, gt=-1, le=1)
    psnr_db: float | None = Field(default=None, ge=0, le=100)
    clip: float | None = Field(default=0.95, gt=0, le=2)


DEFAULT_LIMITS = Limits()
