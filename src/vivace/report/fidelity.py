"""Quality: how close a recipe's images are to the baseline's. `quality_gate` decides whether that is close enough.

Everything here is computed from the stored figures of single images when records are read, so limits can change later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vivace.foundation.spec.figures import ImageFigures, QualityPass, key_of, unpacked
from vivace.foundation.spec.record import ImageRecord, Record
from vivace.foundation.stats import Interval, mean_interval
from vivace.report.variety import Variety, bounds_of, variety

CAP = 0.2
"""At the gate no single image counts for less than 80 % or more than 120 %: the number of damaged images says more than
the damage of one, and one lost image in 39 should not disappear in the spread of the others."""
ALONE = ("sharpness", "colourfulness", "entropy_bits", "clip_score")
LOST = 0.5
"""Share of its CLIP margin below which an image shows something other than its prompt."""
ANOTHER_BELOW = 0.5
"""Match below which an image shows another picture than its reference."""
_NEAR = 0.9  # match from which an image shows the same picture, unless it surely is another one's
_BESIDE_OTHERS = 50.0
"""By how much an image is further from its reference, as 1 - match, than the set's median. Of recipes that round
otherwise, bf16 among them, no image is further than 10 times."""
_LEAST_IMAGES = 6  # that have a median
_OFF, _NEARER = 1.5, 3.0
"""Distance of a thumbnail from its reference's, in levels, from which it may be another one's; and by how much it is
nearer to that."""


@dataclass(frozen=True)
class ComparedFigure:
    """A no-reference figure: its mean, and the mean of the paired differences to the baseline's images."""

    mean: float
    difference: Interval


@dataclass(frozen=True)
class Worst:
    """The prompt with the least kept: the highest share that any of its images kept, and their number."""

    prompt: str
    best: float
    num_pictures: int


@dataclass(frozen=True)
class KeptShare:
    """The share of the baseline's that images keep: of its CLIP margin, or of its contrast (`match`).

    Attributes:
        mean: over all images, with its 95 % interval.
        bounds: what the gate compares with the limit: the mean with each image capped (CAP), its lower bound with
            95 % confidence (SURE_PASS) and its upper bound with 90 % (SURE_FAIL).
        worst: the prompt that kept least.
        lowest: the image that kept least.
    """

    mean: Interval
    bounds: Interval
    worst: Worst
    lowest: float


@dataclass(frozen=True)
class NamedImage:
    """An image, by its prompt and seed or its file's name, with its `match`."""

    name: str
    match: float


@dataclass(frozen=True)
class Fidelity:
    """How close images are to the baseline's images of the same prompts and seeds.

    Means over all images; an identical image counts as SSIM 1, similarity 100 and LPIPS 0. `psnr_db` is the mean over
    the images that differ; None if none does. Intervals count prompts, since the images of one prompt are correlated.
    `clip` is the share of the baseline's CLIP margin that is kept (see spec.limits), paired by prompt and seed; None
    without scores. `witness` is the same by a second model, and `match` the share of the baseline's contrast (see
    measure.image_metrics); None if an image has no `match`. `variety` is how much the images differ from each other,
    beside the baseline's; None if any was stored without thumbnails (then `has_thumbnails` is false), or nothing can be
    compared. `others` are the images that show another picture than the baseline's (see report.other_pictures), and
    `holes` those with a patch of one colour that the baseline's have not. `num_lost` counts images with a hole or with
    less than LOST of the CLIP margin, `num_lost_or_other` those and the `others`. `alone` holds the figures of ALONE.

    Of images that were made from others: `outside` is the share of a source's contrast that is kept outside of the
    mask, `source` the share of the baseline's likeness to the sources that is kept, as `clip` for prompts; both None
    where there is nothing to compare with.
    """

    num_pictures: int
    num_identical: int
    num_prompts: int
    psnr_db: Interval | None
    worst_psnr_db: float | None
    ssim: Interval | None
    match: KeptShare | None = None
    clip: KeptShare | None = None
    witness: KeptShare | None = None
    clip_score: Interval | None = None
    clip_similarity: Interval | None = None
    lpips: Interval | None = None
    alone: Mapping[str, ComparedFigure] = field(default_factory=dict)
    outside: KeptShare | None = None
    outside_of_baseline: Interval | None = None
    outside_psnr_db: Interval | None = None
    source: KeptShare | None = None
    source_similarity: Interval | None = None
    variety: Variety | None = None
    has_thumbnails: bool = False
    others: tuple[NamedImage, ...] = ()
    holes: tuple[NamedImage, ...] = ()
    num_lost: int = 0
    num_lost_or_other: int = 0

    @property
    def clip_kept(self) -> Interval | None:
        return None if self.clip is None else self.clip.mean

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("num_pictures", "num_identical", "num_prompts", "worst_psnr_db")
        }
        for name in ("psnr_db", "ssim", "clip_score", "clip_similarity", "lpips"):
            fields[name] = interval_json(getattr(self, name))
        for name in ("outside_psnr_db", "source_similarity"):
            fields |= {name: interval_json(of)} if (of := getattr(self, name)) is not None else {}
        for name in ("clip", "witness", "match", *(n for n in ("outside", "source") if getattr(self, n))):
            kept: KeptShare | None = getattr(self, name)
            fields[f"{name}_kept"] = kept and interval_json(kept.mean)
            fields[f"{name}_bounds"] = kept and interval_json(kept.bounds, "bounds")
            fields[f"{name}_worst"] = kept and {"prompt": kept.worst.prompt, "best": kept.worst.best}
        for name in ("others", "holes"):
            if images := getattr(self, name):
                fields[name] = [{"image": each.name, "match": each.match} for each in images]
        if self.variety is not None:
            fields["variety_bounds"] = interval_json(self.variety.bounds, "bounds")
            fields["variety_lowest"] = interval_json(self.variety.lowest.bounds, "bounds")
        fields["alone"] = {
            name: {"mean": c.mean, "difference": interval_json(c.difference)}
            for name, c in self.alone.items()
        }
        return fields


@dataclass(frozen=True)
class PairedFigures:
    """Figures of a record's images, and of the baseline's images of the same prompts and seeds.

    Attributes:
        names: of the images, for reports; empty for their prompts.
    """

    figures: tuple[ImageFigures, ...]
    references: tuple[ImageFigures, ...]
    names: tuple[str, ...] = ()


def paired_figures(images: Sequence[ImageRecord], baseline: Record, quality: QualityPass) -> PairedFigures:
    """Pair the stored figures of images with the baseline's. Images without figures are left out."""
    references = {(p.prompt, p.seed): p.sha256 for p in baseline.rounds[0].pictures}
    rows, originals, names = [], [], []
    for image in images:
        sha = references.get((image.prompt, image.seed))
        if sha is None:
            continue
        workload = baseline.trial.workload
        row = quality.figures.get(key_of(image, sha, workload, quality.scorer))
        as_drawn = image.model_copy(update={"sha256": sha})
        original = quality.figures.get(key_of(as_drawn, sha, workload, quality.scorer))
        if row is not None and original is not None:
            rows.append(row)
            originals.append(original)
            names.append(f'"{image.prompt}" seed {image.seed}')
    return PairedFigures(tuple(rows), tuple(originals), tuple(names))


def fidelity(pairs: PairedFigures) -> Fidelity | None:
    if not pairs.figures:
        return None
    rows, prompts = pairs.figures, [f.prompt for f in pairs.figures]
    psnr = [(f.against["psnr_db"], f.prompt) for f in rows if "psnr_db" in f.against]
    matches = [1.0 if f.is_identical else f.against.get("match") for f in rows]
    present = [m for m in matches if m is not None]
    has_thumbnails = all(row.thumbnail is not None for row in (*rows, *pairs.references))
    names = pairs.names or tuple(f'"{prompt}"' for prompt in prompts)
    of_images, of_references = (
        [unpacked(row.thumbnail or "") for row in side] if has_thumbnails else []
        for side in (rows, pairs.references)
    )
    others = other_pictures(present, of_images, of_references) if len(present) == len(rows) else []
    draws_rectangles = any(row.alone.get("num_rectangles") for row in pairs.references)
    holes = [
        k
        for k, row in enumerate(rows)
        if row.against.get("hole") or (row.against.get("num_rectangles") and not draws_rectangles)
    ]
    of_clip = _margin_shares(pairs, "clip_score")
    lost = {*holes, *(k for k, share in of_clip.items() if share < LOST)}
    return Fidelity(
        num_pictures=len(rows),
        num_identical=sum(1 for f in rows if f.is_identical),
        num_prompts=len(set(prompts)),
        psnr_db=_over_prompts(psnr) if psnr else None,
        worst_psnr_db=min((p for p, _ in psnr), default=None),
        ssim=_mean(rows, "ssim", identical=1.0),
        match=_kept(present, prompts) if len(present) == len(rows) else None,
        clip=_margin_kept(pairs, of_clip),
        witness=_margin_kept(pairs, _margin_shares(pairs, "witness_score")),
        clip_score=_mean_alone(rows, "clip_score"),
        clip_similarity=_mean(rows, "clip_similarity", identical=100.0),
        lpips=_mean(rows, "lpips", identical=0.0),
        outside=_outside(rows),
        outside_of_baseline=None if (of := _outside(pairs.references)) is None else of.bounds,
        outside_psnr_db=_mean_alone(rows, "outside_psnr_db"),
        source=_margin_kept(pairs, _margin_shares(pairs, "source_similarity")),
        source_similarity=_mean_alone(rows, "source_similarity"),
        variety=variety(pairs.figures, pairs.references),
        has_thumbnails=has_thumbnails,
        others=tuple(NamedImage(names[k], present[k]) for k in others),
        holes=tuple(NamedImage(names[k], rows[k].against.get("match", 0.0)) for k in holes),
        num_lost=len(lost),
        num_lost_or_other=len(lost | set(others)),
        alone={name: kept for name in ALONE if (kept := _compared(pairs, name)) is not None},
    )


def _outside(rows: Sequence[ImageFigures]) -> KeptShare | None:
    shares = [(f.alone["outside_match"], f.prompt) for f in rows if "outside_match" in f.alone]
    return _kept([share for share, _ in shares], [prompt for _, prompt in shares]) if shares else None


def _compared(pairs: PairedFigures, name: str) -> ComparedFigure | None:
    values = [
        (f.alone[name], r.alone[name], f.prompt)
        for f, r in zip(pairs.figures, pairs.references, strict=True)
        if name in f.alone and name in r.alone
    ]
    if not values:
        return None
    difference = _over_prompts([(a - b, prompt) for a, b, prompt in values])
    return ComparedFigure(sum(a for a, _, _ in values) / len(values), difference)


def _margin_shares(pairs: PairedFigures, name: str) -> dict[int, float]:
    """Return 1 - (drop of the score) / (the baseline's mean margin) of each image that has a score, by its number.

    None has one if the baseline's images have no positive margin.
    """
    scores = {
        k: (f.alone[name], r.alone[name], r.alone[f"{name}_of_others"])
        for k, (f, r) in enumerate(zip(pairs.figures, pairs.references, strict=True))
        if name in f.alone and f"{name}_of_others" in r.alone
    }
    margin = sum(own - others for _, own, others in scores.values()) / max(1, len(scores))
    return {k: 1 - (own - score) / margin for k, (score, own, _) in scores.items()} if margin > 0 else {}


def _margin_kept(pairs: PairedFigures, shares: Mapping[int, float]) -> KeptShare | None:
    return _kept(list(shares.values()), [pairs.figures[k].prompt for k in shares]) if shares else None


def _kept(shares: Sequence[float], prompts: Sequence[str]) -> KeptShare:
    best: dict[str, list[float]] = {}
    for share, prompt in zip(shares, prompts, strict=True):
        best.setdefault(prompt, []).append(share)
    prompt, of_prompt = min(best.items(), key=lambda item: (len(item[1]) == 1, max(item[1])))
    return KeptShare(
        mean_interval(shares, prompts),
        bounds_of([min(max(share, 1 - CAP), 1 + CAP) for share in shares], prompts),
        Worst(prompt, max(of_prompt), len(of_prompt)),
        min(shares),
    )


def _mean(rows: Sequence[ImageFigures], name: str, *, identical: float) -> Interval | None:
    values = [identical if f.is_identical else f.against.get(name) for f in rows]
    present = [(v, f.prompt) for v, f in zip(values, rows, strict=True) if v is not None]
    is_measured = any(name in f.against for f in rows) or all(f.is_identical for f in rows)
    return _over_prompts(present) if present and is_measured else None


def _mean_alone(rows: Sequence[ImageFigures], name: str) -> Interval | None:
    present = [(f.alone[name], f.prompt) for f in rows if name in f.alone]
    return _over_prompts(present) if present else None


def _over_prompts(values: Sequence[tuple[float, str]]) -> Interval:
    return mean_interval([value for value, _ in values], [prompt for _, prompt in values])


def interval_json(interval: Interval | None, name: str = "ci95") -> dict[str, Any] | None:
    if interval is None:
        return None
    low, high = interval.low, interval.high
    return {"mean": interval.point, name: None if low is None or high is None else [low, high]}


# A mean does not see other pictures: 17 of 39 images of another seed cost 8 % of the mean `match` with each image
# capped, and one image nothing. So each pair is asked for itself:
#
#     - its `match` is below a limit: it is as far away as another seed's image;
#     - it is far away where the others differ by rounding;
#     - it is the reference's image of another prompt or seed of the set, which may look much like its own.
def other_pictures(
    matches: Sequence[float],
    thumbnails: Sequence[NDArray[np.float64]] = (),
    references: Sequence[NDArray[np.float64]] = (),
    another_below: float = ANOTHER_BELOW,
) -> list[int]:
    """Return the indices of the images that show another picture than their references.

    Args:
        matches: of each image with its reference; see `measure.image_metrics.match`.
        thumbnails, references: of the images and of their references; empty if they are not known.
    """
    lost = 1 - np.asarray(matches, dtype=np.float64)
    is_other = lost > 1 - another_below
    if len(lost) >= _LEAST_IMAGES:
        is_other |= (lost > 1 - _NEAR) & (lost > _BESIDE_OTHERS * np.median(lost))
    if len(thumbnails) > 1:
        of_images, of_references = (
            np.stack([*each]).reshape(len(lost), -1) for each in (thumbnails, references)
        )
        for k, image in enumerate(of_images):
            distances = np.linalg.norm(of_references - image, axis=1) / math.sqrt(len(image))
            own, nearest = distances[k], np.delete(distances, k).min()
            is_other[k] |= own > max(_OFF, _NEARER * nearest)
    return [int(k) for k in np.flatnonzero(is_other)]
