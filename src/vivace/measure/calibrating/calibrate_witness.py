"""Calibrate a witness: score the damaged images, choose the limit, keep it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import NormalDist
from typing import TYPE_CHECKING

from vivace.errors import UsageError
from vivace.foundation.spec.figures import ImageFigures
from vivace.foundation.spec.limits import SeenDamage, WitnessCalibration
from vivace.foundation.stats import MIN_GROUPS
from vivace.measure.calibrating.scores import CalibrationImages, ImageScores, OnImage, label, score_images
from vivace.measure.damage import HARMLESS, DamageKind
from vivace.measure.this_environment import environment
from vivace.measure.witness_limits import keep
from vivace.models.find import LocatedModel
from vivace.models.judges import LocatedJudge
from vivace.report.fidelity import KeptShare, PairedFigures, fidelity

if TYPE_CHECKING:
    from vivace.runtime.request import CheckedRequest


STRICTEST = 0.985
"""No limit is above this, the strictest that was shown to be right (docs/quality.md, on the embedded models)."""
_STEP = 0.005
_SURE_FAIL = 0.9


# A change keeps a share of the baseline's margin, as at the gate (`report.fidelity`). The least share that a harmless
# change keeps, with 95 % confidence, is as strict as a limit can be. A kind of damage is seen if what it keeps at the
# grade lies below that with 90 % confidence. The limit is midway between the harmless changes and the mildest damage
# that is seen. Kinds that are not seen are named: other figures have to see them.
@dataclass(frozen=True)
class ChosenLimit:
    """A limit, and the images it was chosen on; see `WitnessCalibration` for the attributes."""

    limit: float | None
    margin: float
    num_images: int
    num_prompts: int
    num_broken: int
    harmless: dict[str, float]
    damage: tuple[SeenDamage, ...]
    faint: tuple[str, ...]


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


def choose_limit(
    scores: Sequence[ImageScores], kinds: Sequence[DamageKind], grade: int, scorer: str
) -> ChosenLimit:
    """Choose the limit of a witness.

    Args:
        grade: of the damage that must fail, from 1 to the number of strengths.
        scorer: its name, for messages.

    Raises:
        UsageError: too few prompts have images, or the witness does not tell their prompts from others.
    """
    sound = [row for row in scores if row.changed is not None]
    prompts = {row.prompt for row in sound}
    if len(prompts) < MIN_GROUPS:
        broken = sorted({fault for row in scores for fault in row.faults})
        raise UsageError(
            f"{len(prompts)} of {len({row.prompt for row in scores})} prompts have sound images "
            f"({', '.join(broken) or 'none is broken'}); a calibration needs {MIN_GROUPS}"
        )
    margin = sum(row.own - row.others for row in sound) / len(sound)
    if margin <= 0:
        raise UsageError(
            f"{scorer} scores the baseline's images no higher with their own prompts ({margin:+.2f} points) than with "
            "others: it does not understand these images or prompts; give another --witness"
        )
    harmless = {change.name: _low(_kept_share(sound, change.name)) for change in HARMLESS}
    least = min(STRICTEST, *harmless.values())
    shares = {kind.name: _shares_of(sound, kind) for kind in kinds}
    at_grade = {name: _high(of[grade - 1]) for name, of in shares.items()}
    failing = [high for high in at_grade.values() if high < least]
    limit = _between(max(failing), least) if failing else None
    return ChosenLimit(
        limit,
        margin,
        len(sound),
        len(prompts),
        len(scores) - len(sound),
        harmless,
        tuple(_seen(kind, shares[kind.name], limit) for kind in kinds),
        tuple(name for name, high in at_grade.items() if high >= least),
    )


def _between(low: float, high: float) -> float:
    """Return a number midway, rounded to half a percent if that still lies between."""
    middle = (low + high) / 2
    rounded = round(round(middle / _STEP) * _STEP, 4)
    return rounded if low < rounded <= high else middle


def _seen(kind: DamageKind, shares: Sequence[KeptShare], limit: float | None) -> SeenDamage:
    seen_from = None
    if limit is not None:
        seen_from = least_detected([_power(share, limit) for share in shares], kind.strengths)
    return SeenDamage(
        damage=kind.name,
        unit=kind.unit,
        strengths=kind.strengths,
        kept=tuple(round(share.mean.point, 4) for share in shares),
        seen_from=None if seen_from is None else float(f"{seen_from:.3g}"),
    )


def _power(share: KeptShare, limit: float) -> float:
    """Return the probability that another run of as many prompts fails at the limit."""
    bounds = share.bounds
    assert bounds.high is not None, "there are enough prompts"
    normal = NormalDist()
    error = (bounds.high - bounds.point) / normal.inv_cdf(_SURE_FAIL)
    if error == 0:
        return float(bounds.point < limit)
    return normal.cdf((limit - bounds.high) / error)


def _shares_of(scores: Sequence[ImageScores], kind: DamageKind) -> list[KeptShare]:
    return [_kept_share(scores, label(kind, grade)) for grade in range(len(kind.strengths))]


def _kept_share(scores: Sequence[ImageScores], change: str) -> KeptShare:
    """Return the share of the margin that images keep after a change, as the gate computes it."""
    rows, references = [], []
    for k, row in enumerate(scores):
        assert row.changed is not None, "the image is sound"
        key = {"reference": f"a/{k}", "prompt": row.prompt}
        alone = {"clip_score": row.own, "clip_score_of_others": row.others}
        rows.append(
            ImageFigures(**key, sha256=f"b/{k}", alone={"clip_score": row.changed[change]}, against={})
        )
        references.append(ImageFigures(**key, sha256=f"a/{k}", alone=alone, against={}))
    compared = fidelity(PairedFigures(tuple(rows), tuple(references)))
    assert compared is not None, "there is an image"
    assert compared.clip is not None, "there is a margin"
    return compared.clip


def _low(share: KeptShare) -> float:
    return -math.inf if share.bounds.low is None else share.bounds.low


def _high(share: KeptShare) -> float:
    return math.inf if share.bounds.high is None else share.bounds.high


def least_detected(powers: Sequence[float], strengths: Sequence[float], power: float = 0.9) -> float | None:
    """Return the lowest strength from which damage is detected with this power; None if it never is.

    Between two strengths the power is interpolated over their logarithms. If the lowest is detected already, it is
    returned: an upper bound.

    Args:
        powers: the probability that damage is detected at each strength.
        strengths: positive and growing.
    """
    for k, reached in enumerate(powers):
        if min(powers[k:]) < power:
            continue
        if k == 0:
            return strengths[0]
        below, low, high = powers[k - 1], math.log(strengths[k - 1]), math.log(strengths[k])
        return math.exp(low + (power - below) / (reached - below) * (high - low))
    return None
