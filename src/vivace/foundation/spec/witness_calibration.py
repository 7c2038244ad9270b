"""A witness's sensitivity to damage, as calibrated on the images of one model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from vivace.foundation.spec.base import Spec

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
        workload: size, steps and guidance of the images.
        environment: where it was made.
        made: the date, e.g. "2026-11-28".
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
