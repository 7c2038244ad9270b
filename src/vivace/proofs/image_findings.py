"""Faults of the images as a set: broken ones, duplicates, those of another seed or prompt."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vivace.foundation.spec.limits import DEFAULT_LIMITS
from vivace.measure.image_metrics import match, thumbnail
from vivace.proofs.pair_figures import PairFigures, ReadImage
from vivace.proofs.same import Nearness, OwnDistances, nearness
from vivace.report.value_text import count

_ALIKE = 12.0  # of 255: mean difference of thumbnails up to which two images are compared pixel by pixel
_SURELY_DB = 40.0
"""PSNR from which an image is another one's; below it, simple images of a prompt may be alike by chance."""
_LEAST_ALIKE, _ALIKE_SHARE = 3, 1 / 3
"""How many of those that differ are like others, at least, where none surely is."""
_ITSELF = Nearness.ITSELF
_GAP_DB, _MOST_DB = 10.0, 40.0
"""By how much an image is further from A's than all others, at least, and its PSNR, at most."""
RequestOf = Callable[[PairFigures], str]
"""Returns the request that drew an image, or ""."""


@dataclass(frozen=True)
class ImageFinding:
    """A fault in words, with an example, and a request that shows it, or ""."""

    summary: str
    example: str
    request: str = ""

    @property
    def text(self) -> str:
        return f"{self.summary}, e.g. {self.example}"


def broken(pairs: Sequence[PairFigures], request_of: RequestOf) -> list[ImageFinding]:
    """Return the kinds of broken images that B has where A has none."""
    by_fault: dict[str, list[PairFigures]] = {}
    for pair in broken_pairs(pairs):
        for fault in pair.b.faults:
            by_fault.setdefault(fault, []).append(pair)
    return [
        ImageFinding(
            f"{fault}: {count(len(hit), 'image')} of B",
            hit[0].label,
            request_of(hit[0]),
        )
        for fault, hit in by_fault.items()
    ]


def broken_pairs(pairs: Sequence[PairFigures]) -> list[PairFigures]:
    """Return the pairs whose image of B is broken and of A is not."""
    return [pair for pair in pairs if pair.b.faults and not pair.a.faults]


def duplicates(pairs: Sequence[PairFigures], request_of: RequestOf) -> list[ImageFinding]:
    """Return the images of B that are equal though A's differ, and the setting that B seems to ignore."""
    groups: dict[str, list[PairFigures]] = {}
    for pair in pairs:
        if pair.b.is_there and not pair.b.faults:
            groups.setdefault(pair.b.digest, []).append(pair)
    doubled = [group for group in groups.values() if len(group) > 1 and _differ([p.a for p in group])]
    findings = []
    for cause, has_cause in (
        ("the seed is ignored", _has_several_seeds),
        ("the prompt is ignored", _has_several_prompts),
    ):
        hit = [group for group in doubled if has_cause(group)]
        if hit:
            number = sum(len(group) for group in hit)
            first, second = hit[0][:2]
            findings.append(
                ImageFinding(
                    f"duplicates: {number} of B's {len(pairs)} images are equal to others of B, as if {cause}",
                    f"{first.label} and {second.label}",
                    request_of(second),
                )
            )
    return findings


def switched(pairs: Sequence[PairFigures], own: OwnDistances, request_of: RequestOf) -> list[ImageFinding]:
    """Return whether B's images are A's of other seeds or prompts."""
    thumbnails = {id(pair): thumbnail(pair.a.pixels) for pair in pairs if pair.a.is_there}
    hits = []
    off = [
        pair
        for pair in pairs
        if pair.against and nearness(pair.against, own) in (Nearness.ANOTHER, Nearness.CHANGED)
    ]
    for pair in off:
        other = _original_of(pair, pairs, thumbnails)
        if other is not None:
            hits.append((pair, other))
    if len(hits) < max(_LEAST_ALIKE, _ALIKE_SHARE * len(off)):
        hits = [hit for hit in hits if _is_surely(*hit)]
    if not hits:
        return []
    kinds = Counter("seed" if pair.prompt == other.prompt else "prompt" for pair, other in hits)
    kind = kinds.most_common(1)[0][0]
    pair, other = hits[0]
    return [
        ImageFinding(
            f"switched: {count(len(hits), 'image')} of B {'is' if len(hits) == 1 else 'are'} A's of another {kind}",
            f"{pair.label} is A's {other.label}",
            request_of(pair),
        )
    ]


def mixed(pairs: Sequence[PairFigures], own: OwnDistances, request_of: RequestOf) -> list[ImageFinding]:
    """Return whether a few images of B are different, while the rest equal A's up to rounding."""
    compared = [pair for pair in pairs if pair.against]
    levels = [nearness(pair.against, own) for pair in compared]
    rest = [pair.against["psnr_db"] for pair, level in zip(compared, levels, strict=True) if level is _ITSELF]
    limit = min(min(rest, default=0.0) - _GAP_DB, _MOST_DB)
    odd = [
        k
        for k, (pair, level) in enumerate(zip(compared, levels, strict=True))
        if level in (Nearness.ANOTHER, Nearness.CHANGED)
        or (level is Nearness.NEAR and pair.against["psnr_db"] < limit)
    ]
    if not odd or len(rest) < max(2 * len(odd), len(levels) - len(odd)):
        return []
    steps = {second - first for first, second in itertools.pairwise(odd)}
    often = f", one in {steps.pop()}" if len(odd) > 2 and len(steps) == 1 else ""
    number = f"{len(odd)} of B's {len(levels)} {'images are other ones' if len(odd) > 1 else 'images is another one'}"
    summary = f"mixed: {number}{often}, all others are A's own"
    pair = compared[odd[0]]
    return [ImageFinding(summary, pair.label, request_of(pair))]


def of_other_sizes(pairs: Sequence[PairFigures], request_of: RequestOf) -> list[ImageFinding]:
    """Return whether B's images have another size than A's."""
    hit = [pair for pair in pairs if pair.is_complete and pair.a.size != pair.b.size]
    if not hit:
        return []
    b, a = ("{}x{}".format(*(image.size or (0, 0))) for image in (hit[0].b, hit[0].a))
    return [
        ImageFinding(
            f"another size: {count(len(hit), 'image')} of B",
            f"{hit[0].label}: {b}, A's is {a}",
            request_of(hit[0]),
        )
    ]


def is_lossy(image: ReadImage) -> bool:
    """Return whether an image's file is of a format that loses details."""
    return image.kept.path is not None and image.kept.path.suffix in (".jpg", ".webp")


def _original_of(
    pair: PairFigures, pairs: Sequence[PairFigures], thumbnails: dict[int, np.ndarray]
) -> PairFigures | None:
    """Return the pair whose image of A this image of B is; None if there is none."""
    small = thumbnail(pair.b.pixels)
    limit = DEFAULT_LIMITS.match or 0.9
    best: tuple[float, PairFigures] | None = None
    for other in pairs:
        if other is pair or id(other) not in thumbnails or other.a.size != pair.b.size:
            continue
        if np.abs(thumbnails[id(other)] - small).mean() > _ALIKE:
            continue
        near = match(pair.b.pixels, other.a.pixels)
        if near >= limit and near > pair.against["match"] and (best is None or near > best[0]):
            best = near, other
    return None if best is None else best[1]


def _is_surely(pair: PairFigures, other: PairFigures) -> bool:
    error = float(((pair.b.pixels - other.a.pixels) ** 2).mean())
    return error <= 255.0**2 / 10 ** (_SURELY_DB / 10)


def _differ(images: Sequence[ReadImage]) -> bool:
    """Return whether images are not all the same; missing images do not count."""
    return len({image.digest for image in images if image.is_there}) != 1


def _has_several_seeds(group: Sequence[PairFigures]) -> bool:
    return any(number > 1 for number in Counter(pair.prompt for pair in group).values())


def _has_several_prompts(group: Sequence[PairFigures]) -> bool:
    return len({pair.prompt for pair in group}) > 1
