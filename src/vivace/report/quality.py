"""Quality: how close a recipe's images are to the baseline's, and whether that is close enough.

Everything here is computed from the stored figures of single images when records are read, so limits can change later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vivace.spec.figures import FiguresKey, PictureFigures, QualityPass
from vivace.spec.limits import Limits
from vivace.spec.record import Picture, Record
from vivace.stats import Gate, Interval, gate, mean_interval

CLIP_CAP = 0.2
"""At the gate no single image counts for less than 80 % or more than 120 %: how many images suffered says more than
how much one of them did, and one lost image in 39 should not disappear in the spread of the others."""
MAX_FLAT_SHARE = 0.05
"""A recipe with a larger share of flat images is broken. A model may leave the object out of one image in many."""
ALONE = ("sharpness", "colourfulness", "entropy_bits", "clip_score")


@dataclass(frozen=True)
class Compared:
    """A no-reference figure: its mean, and the mean of the paired differences to the baseline's images."""

    mean: float
    difference: Interval


@dataclass(frozen=True)
class Fidelity:
    """How close images are to the baseline's images of the same prompts and seeds.

    Means over all images; an identical image counts as SSIM 1, similarity 100 and LPIPS 0. `psnr_db` is the mean over
    the images that differ; None if none does. `clip_kept` is the share of the baseline's CLIP margin that is kept (see
    spec.limits), paired by prompt and seed; None without a scorer. `clip_bounds` is what the gate compares with the
    limit: the same share, but with each image capped (CLIP_CAP) and with a 90 % interval, so that each end is a 95 %
    bound. `alone` holds sharpness, colourfulness, entropy_bits and clip_score.
    """

    num_pictures: int
    num_identical: int
    psnr_db: Interval | None
    worst_psnr_db: float | None
    ssim: Interval | None
    clip_score: Interval | None = None
    clip_similarity: Interval | None = None
    clip_kept: Interval | None = None
    clip_bounds: Interval | None = None
    lpips: Interval | None = None
    alone: Mapping[str, Compared] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"num_pictures": self.num_pictures, "num_identical": self.num_identical}
        found["worst_psnr_db"] = self.worst_psnr_db
        for name in ("psnr_db", "ssim", "clip_score", "clip_similarity", "clip_kept", "lpips"):
            found[name] = interval_json(getattr(self, name))
        found["clip_bounds"] = interval_json(self.clip_bounds, "ci90")
        found["alone"] = {
            name: {"mean": c.mean, "difference": interval_json(c.difference)}
            for name, c in self.alone.items()
        }
        return found


@dataclass(frozen=True)
class Judgement:
    """The gate's verdict on a recipe with its reason, and the deciding figure: `ssim`, `psnr_db`, `clip`, `broken`."""

    gate: Gate
    reason: str
    figure: str | None = None


@dataclass(frozen=True)
class PairedFigures:
    """Figures of a record's images, and of the baseline's images of the same prompts and seeds."""

    figures: tuple[PictureFigures, ...]
    references: tuple[PictureFigures, ...]


def paired_figures(pictures: Sequence[Picture], baseline: Record, found: QualityPass) -> PairedFigures:
    """Pair the stored figures of images with the baseline's. Images without figures are left out."""
    references = {(p.prompt, p.seed): p.sha256 for p in baseline.rounds[0].pictures}
    rows, originals = [], []
    for picture in pictures:
        sha = references.get((picture.prompt, picture.seed))
        if sha is None:
            continue
        row = _lookup(found.figures, picture.sha256, sha, picture.prompt, found.scorer)
        original = _lookup(found.figures, sha, sha, picture.prompt, found.scorer)
        if row is not None and original is not None:
            rows.append(row)
            originals.append(original)
    return PairedFigures(tuple(rows), tuple(originals))


def fidelity(pairs: PairedFigures) -> Fidelity | None:
    """Summarise paired figures; None if there are none."""
    if not pairs.figures:
        return None
    rows, kept = pairs.figures, _clip_kept(pairs)
    psnr = [f.against["psnr_db"] for f in rows if "psnr_db" in f.against]
    return Fidelity(
        num_pictures=len(rows),
        num_identical=sum(1 for f in rows if f.is_identical),
        psnr_db=mean_interval(psnr) if psnr else None,
        worst_psnr_db=min(psnr, default=None),
        ssim=_mean(rows, "ssim", identical=1.0),
        clip_score=_mean_alone(rows, "clip_score"),
        clip_similarity=_mean(rows, "clip_similarity", identical=100.0),
        clip_kept=mean_interval(kept) if kept else None,
        clip_bounds=mean_interval([min(max(k, 1 - CLIP_CAP), 1 + CLIP_CAP) for k in kept], 0.9)
        if kept
        else None,
        lpips=_mean(rows, "lpips", identical=0.0),
        alone={name: found for name in ALONE if (found := _compared(pairs, name)) is not None},
    )


def judge(
    record: Record, baseline: Record, found: Fidelity | None, floor: Fidelity | None, limits: Limits
) -> Judgement | None:
    """Return the gate's verdict on a recipe; None if there was no quality pass and no image is broken.

    Broken images (black, flat, noise) fail any recipe. A recipe of `same_picture` techniques only is held to fidelity,
    but never to more than the baseline reaches against itself (`floor`); any other recipe is held to the CLIP margin.
    """
    broken = broken_pictures(record, baseline)
    if broken is not None:
        return Judgement(Gate.FAILED, broken, "broken")
    if found is None:
        return None
    if record.trial.recipe.same_picture:
        return _judge_fidelity(found, floor, limits)
    return _judge_clip(found, limits)


def broken_pictures(record: Record, baseline: Record) -> str | None:
    """Return e.g. "2 of 6 images are broken (black)"; None if no image is broken, a few flat ones excepted.

    An image that is broken in the baseline too (e.g. a safety checker's black frame) does not count.
    """
    pictures = record.rounds[0].pictures
    excused = set()
    if record is not baseline:
        excused = {(p.prompt, p.seed) for p in baseline.rounds[0].pictures if p.faults}
    bad = [p for p in pictures if p.faults and (p.prompt, p.seed) not in excused]
    if all(p.faults == ("flat",) for p in bad) and len(bad) <= MAX_FLAT_SHARE * len(pictures):
        return None
    kinds = ", ".join(sorted({fault for p in bad for fault in p.faults}))
    return f"{len(bad)} of {len(pictures)} images are broken ({kinds})"


def _judge_fidelity(found: Fidelity, floor: Fidelity | None, limits: Limits) -> Judgement:
    if found.num_identical == found.num_pictures:
        return Judgement(Gate.PASSED, "all images are identical to the baseline's")
    judgements: list[Judgement] = []
    for name, label, unit, value, minimum, reached in (
        ("ssim", "SSIM", "", found.ssim, limits.ssim, floor.ssim if floor else None),
        ("psnr_db", "PSNR", " dB", found.psnr_db, limits.psnr_db, floor.psnr_db if floor else None),
    ):
        if minimum is None:
            continue
        if value is None:
            judgements.append(Judgement(Gate.UNCLEAR, f"no {label} could be computed"))
            continue
        relaxed = ""
        if reached is not None and reached.low is not None and reached.low < minimum:
            minimum, relaxed = reached.low, ", which is what the baseline reaches against itself"
        digits = 3 if name == "ssim" else 1
        judgements.append(replace(_judge_figure(value, minimum, label, digits, unit, relaxed), figure=name))
    return _worst(judgements, "no limit on fidelity is set")


def _judge_clip(found: Fidelity, limits: Limits) -> Judgement:
    minimum = limits.for_scorer(None).clip
    if not isinstance(minimum, float):
        return Judgement(Gate.UNCLEAR, "no limit on the CLIP margin is set")
    if found.num_identical == found.num_pictures:
        return Judgement(Gate.PASSED, "all images are identical to the baseline's")
    if found.clip_kept is None or found.clip_bounds is None:
        reason = (
            "no CLIP model scored the images"
            if found.clip_score is None
            else "CLIP scores the baseline's images no higher with their own prompts than with others"
        )
        return Judgement(Gate.UNCLEAR, reason)
    bounds = found.clip_bounds
    kept = f"CLIP margin kept {100 * found.clip_kept.point:.1f} %"
    # The interval is that of the capped mean; the uncapped mean could lie outside it.
    capped = f"CLIP margin kept {100 * bounds.point:.1f} %, single images capped"
    wanted = f"the limit is {100 * minimum:g} %"
    if bounds.low is None or bounds.high is None:
        return Judgement(Gate.UNCLEAR, f"{kept}: too few images for an interval", "clip")
    verdict = gate(bounds, minimum)
    if verdict is Gate.FAILED:
        reason = f"{kept}, below {100 * bounds.high:.1f} with 95 % confidence: {wanted}"
    elif verdict is Gate.PASSED:
        reason = f"{capped}, above {100 * bounds.low:.1f} with 95 % confidence; {wanted}"
    else:
        reason = (
            f"{capped} [{100 * bounds.low:.1f}, {100 * bounds.high:.1f}]: too few images to decide, {wanted}"
        )
    return Judgement(verdict, reason, "clip")


def _judge_figure(
    value: Interval, minimum: float, label: str, digits: int, unit: str, relaxed: str
) -> Judgement:
    verdict = gate(value, minimum)
    text = f"{label} {value.point:.{digits}f}"
    if value.low is None or value.high is None:
        return Judgement(verdict, f"{text}{unit}: too few images for an interval")
    text += f" [{value.low:.{digits}f}, {value.high:.{digits}f}]{unit}"
    wanted = f"the limit is {minimum:.{digits}f}{unit}{relaxed}"
    if verdict is Gate.UNCLEAR:
        return Judgement(verdict, f"{text}: too few images to decide, {wanted}")
    return Judgement(verdict, f"{text}; {wanted}" if verdict is Gate.PASSED else f"{text}: {wanted}")


def _worst(judgements: Sequence[Judgement], otherwise: str) -> Judgement:
    for verdict in (Gate.FAILED, Gate.UNCLEAR, Gate.PASSED):
        matching = [j for j in judgements if j.gate is verdict]
        if matching:
            return Judgement(verdict, "; ".join(j.reason for j in matching), matching[0].figure)
    return Judgement(Gate.UNCLEAR, otherwise)


def _compared(pairs: PairedFigures, name: str) -> Compared | None:
    values = [
        (f.alone[name], r.alone[name])
        for f, r in zip(pairs.figures, pairs.references, strict=True)
        if name in f.alone and name in r.alone
    ]
    if not values:
        return None
    return Compared(sum(a for a, _ in values) / len(values), mean_interval([a - b for a, b in values]))


def _clip_kept(pairs: PairedFigures) -> list[float]:
    """Return 1 - (drop of the score) / (the baseline's mean margin) of each image.

    Empty without scores, and if the baseline's images have no positive margin.
    """
    scores = [
        (f.alone["clip_score"], r.alone["clip_score"], r.alone["clip_score_of_others"])
        for f, r in zip(pairs.figures, pairs.references, strict=True)
        if "clip_score" in f.alone and "clip_score_of_others" in r.alone
    ]
    margin = sum(own - others for _, own, others in scores) / max(1, len(scores))
    return [1 - (own - score) / margin for score, own, _ in scores] if margin > 0 else []


def _lookup(
    figures: Mapping[FiguresKey, PictureFigures], sha256: str, reference: str, prompt: str, scorer: str | None
) -> PictureFigures | None:
    return figures.get(FiguresKey(sha256=sha256, reference=reference, prompt=prompt, scorer=scorer))


def _mean(rows: Sequence[PictureFigures], name: str, *, identical: float) -> Interval | None:
    values = [identical if f.is_identical else f.against.get(name) for f in rows]
    known = [v for v in values if v is not None]
    is_measured = any(name in f.against for f in rows) or all(f.is_identical for f in rows)
    return mean_interval(known) if known and is_measured else None


def _mean_alone(rows: Sequence[PictureFigures], name: str) -> Interval | None:
    known = [f.alone[name] for f in rows if name in f.alone]
    return mean_interval(known) if known else None


def interval_json(interval: Interval | None, name: str = "ci95") -> dict[str, Any] | None:
    if interval is None:
        return None
    low, high = interval.low, interval.high
    return {"mean": interval.point, name: None if low is None or high is None else [low, high]}
