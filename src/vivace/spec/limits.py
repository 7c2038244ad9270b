"""What pictures must keep of the baseline's: the limits of the quality gate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vivace.spec.base import Spec

CLIP_LIMITS = {"tiny-clip": 0.99}
"""Scorers whose limit was calibrated against the truth."""
CLIP_LIMIT = 0.95
"""Of all other scorers: a guess on the wide side, since nothing tells the truth about photographs."""


class Limits(Spec):
    """Smallest allowed means over the pictures of a recipe; None holds nothing to that figure.

    ssim: similarity to the baseline's picture of the same prompt and seed; for recipes wholly of `same_picture`
        techniques.
    psnr_db: likewise, in dB.
    clip: share of the baseline's CLIP margin that is kept; for all other recipes. The margin is how much better the
        baseline's pictures fit their own prompt than other prompts, so that 1 is as good as the baseline and 0 as bad
        as pictures of something else, whatever CLIP model scores them. "auto" is the limit that suits the scorer.

    The defaults are justified in docs/quality.md.
    """

    ssim: float | None = Field(default=0.7, gt=-1, le=1)
    psnr_db: float | None = Field(default=None, ge=0, le=100)
    clip: Annotated[float, Field(gt=0, le=2)] | Literal["auto"] | None = "auto"

    def for_scorer(self, scorer: str | None) -> Limits:
        """With a number for "auto". scorer: name@fingerprint, as figures keep it; None without one."""
        if self.clip != "auto":
            return self
        name = (scorer or "").partition("@")[0]
        return self.model_copy(update={"clip": CLIP_LIMITS.get(name, CLIP_LIMIT)})


DEFAULT_LIMITS = Limits()
