"""Calibrate a witness: score the damaged images, choose the limit, keep it."""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from vivace.errors import StoreError, UsageError
from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.figures import ImageFigures
from vivace.foundation.spec.limits import SeenDamage, WitnessCalibration
from vivace.foundation.stats import MIN_GROUPS
from vivace.foundation.untrusted.destinations import replace
from vivace.foundation.untrusted.files import read_object
from vivace.measure.damage import HARMLESS, SHIFT, DamageKind
from vivace.measure.image_metrics import Pixels, aligned, faults, pixels
from vivace.measure.this_environment import environment
from vivace.measure.witness_limits import keep
from vivace.models.scorers import LocatedJudge
from vivace.report.fidelity import KeptShare, PairedFigures, fidelity

if TYPE_CHECKING:
    from vivace.runtime.workloads import CheckedRequest

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
    """Calibrate a witness on images that are drawn, and keep the result for this model."""
    scores = score_images(images, judge, kinds, device, is_read, on_image)
    chosen = choose_limit(scores, kinds, grade, judge.scorer.name)
    calibration = WitnessCalibration(
        model=prepared.located.model.identity,
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


def choose_limit(
    scores: Sequence[ImageScores], kinds: Sequence[DamageKind], grade: int, scorer: str
) -> ChosenLimit:
    """Choose the limit of a witness."""
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
    lows = {change.name: _kept_share(sound, change.name).bounds.low for change in HARMLESS}
    harmless = {name: -math.inf if low is None else low for name, low in lows.items()}
    least = min(STRICTEST, *harmless.values())
    shares = {
        kind.name: [_kept_share(sound, label(kind, grade)) for grade in range(len(kind.strengths))]
        for kind in kinds
    }
    highs = {name: of[grade - 1].bounds.high for name, of in shares.items()}
    at_grade = {name: math.inf if high is None else high for name, high in highs.items()}
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


def least_detected(powers: Sequence[float], strengths: Sequence[float], power: float = 0.9) -> float | None:
    """Return the lowest strength from which damage is detected with this power; None if it never is. Between two
    strengths the power is interpolated over their logarithms. If the lowest is detected already, it is returned: an
    upper bound."""
    for k, reached in enumerate(powers):
        if min(powers[k:]) < power:
            continue
        if k == 0:
            return strengths[0]
        below, low, high = powers[k - 1], math.log(strengths[k - 1]), math.log(strengths[k])
        return math.exp(low + (power - below) / (reached - below) * (high - low))
    return None


_BATCH = 16  # images that are damaged, and scored together
Score = Callable[[Sequence[Any], Sequence[str]], Any]
"""Returns the scores of images (PIL) with prompts, one row for each image."""
OnImage = Callable[[int, int], None]
"""Called with the number of finished images, and of all."""


@dataclass(frozen=True)
class CalibrationImages:
    """The images of one model and workload."""

    folder: Path
    prompts: tuple[str, ...]

    def path(self, index: int) -> Path:
        return self.folder / "images" / f"{index:05d}.png"

    @property
    def missing(self) -> list[int]:
        return [k for k in range(len(self.prompts)) if not self.path(k).exists()]

    def read(self) -> Iterator[tuple[int, Any]]:
        """Yield the index of each image, and the image (PIL, RGB)."""
        from vivace.foundation.untrusted.image_files import open_image

        for k in range(len(self.prompts)):
            yield k, open_image(self.path(k)).convert("RGB")


class ImageScores(Spec):
    """The scores of one image.

    Attributes:
        own, others: with its own prompt, and the mean with the others.
        changed: with its own prompt after each change, by `label`.
        faults: why the image shows nothing; then there are no scores.
    """

    prompt: str
    own: float = 0.0
    others: float = 0.0
    changed: dict[str, float] | None = None
    faults: tuple[str, ...] = ()


def label(kind: DamageKind, grade: int) -> str:
    """Return the key of a damage's scores; grades count from 0."""
    return f"{kind.name}/{grade}"


def score_images(
    images: CalibrationImages,
    judge: LocatedJudge,
    kinds: Sequence[DamageKind],
    device: str = "cpu",
    is_read: Callable[[], None] = lambda: None,
    on_image: OnImage = lambda done, total: None,
) -> list[ImageScores]:
    """Return the scores of all images; stored scores are not computed again."""
    folder = images.folder / sha256(judge.scorer.id.encode()).hexdigest()[:16]
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise StoreError(f"{folder} cannot be written: {error.strerror or error}") from None
    names = [*(change.name for change in HARMLESS)]
    names += [label(kind, grade) for kind in kinds for grade in range(len(kind.strengths))]
    scores = [_kept(folder / f"{k:05d}.json", prompt) for k, prompt in enumerate(images.prompts)]
    todo = [
        k
        for k, row in enumerate(scores)
        if row is None or not (row.faults or set(names) <= (row.changed or {}).keys())
    ]
    if todo:
        distinct = list(dict.fromkeys(images.prompts))
        score = _scorer(judge, distinct, device)
        is_read()
        for done, (k, image) in enumerate(((k, i) for k, i in images.read() if k in set(todo)), start=1):
            row = _scores_of(pixels(image), images.prompts[k], distinct, kinds, score, k)
            replace(folder / f"{k:05d}.json", row.model_dump_json(exclude={"prompt"}).encode())
            scores[k] = row
            on_image(len(scores) - len(todo) + done, len(scores))
    return [row for row in scores if row is not None]


def _scores_of(
    image: Pixels, prompt: str, prompts: list[str], kinds: Sequence[DamageKind], score: Score, seed: int
) -> ImageScores:
    if problems := faults(image):
        return ImageScores(prompt=prompt, faults=tuple(problems))
    whole = np.asarray(score([_as_image(image)], prompts)[0])
    mine = prompts.index(prompt)
    changed: dict[str, float] = {}
    changes = _changes(image, kinds, seed)
    while batch := list(itertools.islice(changes, _BATCH)):
        rows = score([each for _, each in batch], [prompt])
        changed |= {name: float(row[0]) for (name, _), row in zip(batch, rows, strict=True)}
    return ImageScores(
        prompt=prompt, own=float(whole[mine]), others=float(np.delete(whole, mine).mean()), changed=changed
    )


def _changes(image: Pixels, kinds: Sequence[DamageKind], seed: int) -> Iterator[tuple[str, Any]]:
    """Yield the label and the image (PIL) of each change, one after the other: all at once are gigabytes."""
    for change in HARMLESS:
        yield change.name, _as_image(change.apply(image, seed))
    for kind in kinds:
        for grade, strength in enumerate(kind.strengths):
            damaged = kind.apply(image, strength, seed)
            # A shift by a pixel or two is moved back, as the gate does.
            yield (
                label(kind, grade),
                _as_image(aligned(damaged, image) if kind.name == SHIFT else damaged),
            )


def _as_image(image: Pixels) -> Any:
    from PIL import Image

    return Image.fromarray(image.astype(np.uint8))


def _scorer(judge: LocatedJudge, prompts: Sequence[str], device: str) -> Score:
    from vivace.models.quiet import quiet

    if judge.kind == "blip":
        from vivace.measure.scorer import Witness

        with quiet():
            witness = Witness(judge.scorer.folder, device)
        return lambda images, prompts: [witness.scores(image, prompts) for image in images]
    from vivace.measure.scorer import ClipScorer

    with quiet():
        clip = ClipScorer(judge.scorer.folder, device)
    of_prompts = dict(zip(prompts, clip.embed_prompts(prompts), strict=True))

    def score(images: Sequence[Any], prompts: Sequence[str]) -> Any:
        return 100 * clip.embed_images(images) @ np.stack([of_prompts[prompt] for prompt in prompts]).T

    return score


def _kept(file: Path, prompt: str) -> ImageScores | None:
    if not file.exists():
        return None
    try:
        return ImageScores.model_validate({"prompt": prompt} | read_object(file))
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{file} is damaged ({error!r}); delete it, and run the same command again"
        ) from None


def images_of(prepared: CheckedRequest, store: Path) -> CalibrationImages:
    """Return the images of a request, drawn or not."""
    workload = prepared.workload
    if (number := len(set(workload.prompts))) < MIN_GROUPS:
        raise UsageError(
            f"{number} {'prompt' if number == 1 else 'prompts'}: a calibration needs {MIN_GROUPS} or more; give "
            "--prompts FILE"
        )
    identity = json.dumps(
        {"model": prepared.located.model.model_dump(), "workload": workload.model_dump(mode="json")},
        sort_keys=True,
    )
    folder = store / "calibrate-witness" / sha256(identity.encode()).hexdigest()[:16]
    try:
        (folder / "images").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"--store {store} cannot be written: {error.strerror or error}") from None
    replace(folder / "of.json", (identity + "\n").encode())
    return CalibrationImages(folder, tuple(prompt for _, prompt, _ in workload.images()))


def draw_missing(
    prepared: CheckedRequest,
    images: CalibrationImages,
    device: str,
    is_read: Callable[[], None] = lambda: None,
    on_image: OnImage = lambda done, total: None,
) -> None:
    """Draw the images that are not there yet, each kept at once."""
    from vivace.models.load import explained
    from vivace.models.quiet import quiet

    missing = images.missing
    if not missing:
        return
    calls = {k: (k, prompt, seed) for k, prompt, seed in prepared.workload.images()}
    total = len(calls)
    with explained(prepared.located), quiet():
        session = prepared.open(device)
    is_read()
    with session:
        for number, k in enumerate(missing, start=total - len(missing) + 1):
            with explained(prepared.located, "does not run"):
                output = session(**prepared.arguments([calls[k]]))
            file = io.BytesIO()
            output.images[0].convert("RGB").save(file, "PNG")
            replace(images.path(k), file.getvalue())
            on_image(number, total)
