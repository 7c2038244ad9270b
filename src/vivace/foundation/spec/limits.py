"""The limits of the quality gate: how much of the baseline's image quality a recipe must keep."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.input_errors import expectation_of
from vivace.foundation.spec.settings import Option, read_by

ONE_VIEW = "tiny-clip@cc74678cc4261383"
"""Revision of tiny-clip that looked at each image at one zoom; it scored the committed records of embedded models."""
CLIP_LIMITS = {"tiny-clip": 0.985, ONE_VIEW: 0.99}
"""Limits by scorer, by name or by name and revision, calibrated against images whose content is known."""
CLIP_LIMIT = 0.95
"""Limit of all other scorers: a lenient guess, since there is no ground truth for photographs."""


WITNESS_LIMIT = 0.9
"""Limit of a second witness: a lenient guess as well."""
VARIETY_LIMIT = 0.75
"""A different set of images that vary as much as the baseline's keeps 0.7 to 1.3 by any one distance."""


class Limits(Spec):
    """Minimum means over the images of a recipe; None switches a limit off.

    The defaults are justified in docs/quality.md.

    Attributes:
        clip: share of the baseline's CLIP margin that is kept. Applies to all recipes. The margin is how much better
            the baseline's images fit their own prompts than other prompts. So 1 is as good as the baseline and 0 as bad
            as images of something else, whatever the scorer. "auto" is the scorer's own limit.
        match: share of the contrast of the baseline's image that the image of the same prompt and seed reproduces.
            Applies to recipes in which every technique is `same_picture`.
        ssim: structural similarity to the baseline's image, for the same recipes.
        psnr_db: likewise, in dB.
        witness: as `clip`, by the second model, if there is one.
        outside: share of the contrast of the image to inpaint that the image reproduces outside of the mask. Never
            more is required than the baseline reaches.
        source: as `clip`, for likeness to the image to edit instead of the prompt.
        variety: share of the baseline's differences between seeds, and between prompts, that is kept (see
            `report.variety`). Applies to recipes that may give another image.
    """

    clip: Annotated[float, Field(gt=0, le=2)] | Literal["auto"] | None = "auto"
    match: float | None = Field(default=0.9, gt=0, le=1)
    ssim: float | None = Field(default=None, gt=-1, le=1)
    psnr_db: float | None = Field(default=None, ge=0, le=100)
    witness: float | None = Field(default=WITNESS_LIMIT, gt=0, le=2)
    outside: float | None = Field(default=0.9, gt=0, le=1)
    source: float | None = Field(default=0.9, gt=0, le=2)
    variety: float | None = Field(default=VARIETY_LIMIT, gt=0, le=1)

    @classmethod
    def parse(cls, text: str) -> Limits:
        """Read e.g. "clip=0.97,psnr_db=30"; NAME=off removes a limit."""
        limits: dict[str, float | None] = {}
        names = ", ".join(cls.model_fields)
        for part in text.split(","):
            name, separator, number = (each.strip() for each in part.partition("="))
            if not separator or name not in cls.model_fields:
                raise ValueError(f"{part.strip()!r} is not NAME=VALUE; NAME is one of {names}")
            try:
                limits[name] = None if number == "off" else float(number)
            except ValueError:
                raise ValueError(f"{number!r} for {name} is not a number or off") from None
        try:
            return cls(**limits)
        except ValidationError as error:
            problem = error.errors()[0]
            raise ValueError(f"{problem['loc'][0]}={problem['input']} {expectation_of(error)}") from None

    def for_scorer(self, scorer: str | None) -> Limits:
        """Return the limits with "auto" replaced by the scorer's number."""
        if self.clip != "auto":
            return self
        name = (scorer or "").partition("@")[0]
        limit = CLIP_LIMITS.get(scorer or "", CLIP_LIMITS.get(name, CLIP_LIMIT))
        return self.model_copy(update={"clip": limit})


DEFAULT_LIMITS = Limits()

MinQuality = Annotated[
    Limits | None,
    read_by(Limits.parse),
    Option(
        "Quality limits against the baseline, e.g. clip=0.97,match=0.95,psnr_db=30; NAME=off removes one.",
        "--min-quality",
        metavar="NAME=VALUE,...",
    ),
]

JudgeKind = Literal["clip", "blip"]
"""The kind of model that scores images."""


class SeenDamage(Spec):
    """The witness's sensitivity to one kind of damage.

    Attributes:
        strengths: that were tried, in `unit`, growing.
        kept: mean share of the margin that is kept at each.
        seen_from: least strength that fails the limit in nine of ten runs of as many prompts; None if none does, or if
            there is no limit.
    """

    damage: str
    unit: str
    strengths: tuple[float, ...]
    kept: tuple[float, ...]
    seen_from: float | None = None


class WitnessCalibration(Spec):
    """The limit of a witness, with its calibration.

    Attributes:
        model, scorer: NAME@REVISION.
        kind: how the scorer reads prompts: "clip" and "blip" models are asked differently.
        limit: least share of the margin that must be kept; None if the witness sees no damage of the grade.
        grade: of the damage that must fail, from 1 to 5.
        margin: how much better the baseline's images fit their own prompts than others, in points of the score.
        harmless: by change that no viewer would mind, the share kept that is reached with 95 % confidence.
        faint: kinds whose damage of that grade the witness does not tell from a harmless change.
    """

    model: str
    scorer: str
    kind: JudgeKind
    limit: float | None = Field(gt=0, le=1)
    grade: int = Field(ge=1)
    num_images: int
    num_prompts: int
    margin: float
    harmless: dict[str, float]
    damage: tuple[SeenDamage, ...]
    faint: tuple[str, ...]
    workload: dict[str, Any]
    environment: dict[str, Any]
    made: str
