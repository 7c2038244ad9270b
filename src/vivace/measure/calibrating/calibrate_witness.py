"""Calibrate a witness: score the damaged images, choose the limit, keep it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from vivace.foundation.spec.witness_calibration import WitnessCalibration
from vivace.measure.calibrating.images import CalibrationImages, OnImage
from vivace.measure.calibrating.limit import choose_limit
from vivace.measure.calibrating.scores import score_images
from vivace.measure.damage import DamageKind
from vivace.measure.this_environment import environment
from vivace.measure.witness_limits import keep
from vivace.models.find import LocatedModel
from vivace.models.judges import LocatedJudge

if TYPE_CHECKING:
    from vivace.runtime.request import CheckedRequest


def calibrate_witness(
    prepared: CheckedRequest,
    images: CalibrationImages,
    judge: LocatedJudge,
    kinds: Sequence[DamageKind],
    grade: int,
    device: str,
    is_read: Callable[[], None] = lambda: None,
    on_image: OnImage = lambda done, total: None,
) -> WitnessCalibration:
    """Calibrate a witness on images that are drawn, and keep the result for this model.

    Args:
        kinds: of damage.
        grade: of the damage that must fail, from 1.
        device: torch's type of device.
        is_read: called when the witness is loaded.
        on_image: called after each image that was scored.

    Raises:
        UsageError: too few images show anything, or the witness does not understand them.
    """
    scores = score_images(images, judge, kinds, device, is_read, on_image)
    chosen = choose_limit(scores, kinds, grade, judge.scorer.name)
    calibration = WitnessCalibration(
        model=identity_of(prepared.located),
        scorer=judge.scorer.id,
        kind=judge.kind,
        limit=chosen.limit,
        grade=grade,
        num_images=chosen.num_images,
        num_prompts=chosen.num_prompts,
        margin=chosen.margin,
        harmless=chosen.harmless,
        damage=chosen.damage,
        faint=chosen.faint,
        workload=prepared.workload.call,
        environment=environment(device).model_dump(mode="json"),
        made=f"{datetime.now(UTC):%Y-%m-%d}",
    )
    keep(calibration)
    return calibration


def identity_of(located: LocatedModel) -> str:
    """Return NAME@REVISION of a model."""
    return f"{located.model.name}@{located.model.revision}"
