"""Faults of the images as a set: broken ones, holes, duplicates, those of another seed or prompt.

What is found are observations. A cause is named only where the reference draws B's image with it, up to rounding.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vivace.answers.formatting import count
from vivace.proofs.checks.pair_figures import Nearness, PairFigures, ReadImage, are_equal

_ALIKE = 2.0  # of 255: mean difference of thumbnails up to which two images are compared pixel by pixel
_GAP_DB, _MOST_DB = 10.0, 40.0
"""By how much an image is further from A's than all others, at least, and its PSNR, at most."""
RequestOf = Callable[[PairFigures], str]
"""Returns the request that drew an image, or ""."""


@dataclass(frozen=True)
class ImageFinding:
    """A fault in words, with an example, and a request that shows it, or "".

    Attributes:
        is_cause: whether it says why images differ.
    """

    summary: str
    example: str
    request: str = ""
    is_cause: bool = False

    @property
    def text(self) -> str:
        return f"{self.summary}, e.g. {self.example}"


def broken(pairs: Sequence[PairFigures], request_of: RequestOf) -> list[ImageFinding]:
    """Return the kinds of broken images that B has where A has none, holes among them."""
    by_fault: dict[str, list[PairFigures]] = {}
    for pair in broken_pairs(pairs):
        for fault in pair.b.faults or ("hole",):
            by_fault.setdefault(fault, []).append(pair)
    patch = {"hole": " with a patch of one colour, which is not A's"}
    return [
        ImageFinding(
            f"{fault}: {count(len(hit), 'image')} of B{patch.get(fault, '')}",
            hit[0].label,
            request_of(hit[0]),
            is_cause=True,
        )
        for fault, hit in by_fault.items()
    ]


def broken_pairs(pairs: Sequence[PairFigures]) -> list[PairFigures]:
    """Return the pairs whose image of B is broken, or has a hole, and of A is not."""
    return [pair for pair in pairs if not pair.a.faults and (pair.b.faults or pair.has_hole)]


def broken_in_words(pairs: Sequence[PairFigures]) -> str:
    """Describe B's broken images; "" if there are none."""
    hit = broken_pairs(pairs)
    kinds = ", ".join(sorted({fault for pair in hit for fault in pair.b.faults or ("a hole",)}))
    return (
        f"{count(len(hit), 'image')} of B {'is' if len(hit) == 1 else 'are'} broken ({kinds})" if hit else ""
    )


def duplicates(pairs: Sequence[PairFigures], request_of: RequestOf) -> list[ImageFinding]:
    """Return the images of B that are equal though A's differ; a setting is ignored if all that differ by it are."""
    sound = [pair for pair in pairs if pair.b.is_there and not pair.b.faults]
    doubled = [group for group in _groups(sound, lambda p: p.b.digest) if _differ([p.a for p in group])]
    if not doubled:
        return []
    causes = [
        f"the {ignored} is ignored"
        for ignored, groups in (
            ("seed", _groups(sound, lambda p: (p.prompt, p.size))),
            ("prompt", _groups(sound, lambda p: (p.seed, p.size))),
        )
        if groups and not any(_differ([p.b for p in group]) for group in groups)
    ]
    first, second = doubled[0][:2]
    summary = f"duplicates: {sum(map(len, doubled))} of B's {len(pairs)} images are equal to others of B"
    summary += f", as if {' and '.join(causes)}" if causes else ", though A's differ"
    return [ImageFinding(summary, f"{first.label} and {second.label}", request_of(second), bool(causes))]


def switched(pairs: Sequence[PairFigures], request_of: RequestOf) -> list[ImageFinding]:
    """Return whether B's images are A's of other seeds or prompts, up to rounding."""
    hits = [
        (pair, other) for pair in pairs if pair.differs and (other := _original_of(pair, pairs)) is not None
    ]
    if not hits:
        return []
    kinds = Counter("seed" if pair.prompt == other.prompt else "prompt" for pair, other in hits)
    pair, other = hits[0]
    verb = "is" if len(hits) == 1 else "are"
    return [
        ImageFinding(
            f"switched: {count(len(hits), 'image')} of B {verb} A's of another {kinds.most_common(1)[0][0]}",
            f"{pair.label} is A's {other.label}",
            request_of(pair),
            is_cause=len(hits) == sum(pair.differs for pair in pairs),
        )
    ]


def find_switched(pairs: Sequence[PairFigures], request_of: RequestOf) -> list[ImageFinding]:
    """Return whether a few images of B are different, while the rest equal A's up to rounding."""
    compared = [pair for pair in pairs if pair.against]
    rest = [pair.against["psnr_db"] for pair in compared if pair.nearness is Nearness.ITSELF]
    limit = min(min(rest, default=0.0) - _GAP_DB, _MOST_DB)
    odd = [
        k
        for k, pair in enumerate(compared)
        if pair.differs or (pair.nearness is Nearness.NEAR and pair.against["psnr_db"] < limit)
    ]
    if not odd or len(rest) < max(2 * len(odd), len(compared) - len(odd)):
        return []
    steps = {second - first for first, second in itertools.pairwise(odd)}
    often = f", one in {steps.pop()}" if len(odd) > 2 and len(steps) == 1 else ""
    are = "images are other ones" if len(odd) > 1 else "images is another one"
    summary = f"mixed: {len(odd)} of B's {len(compared)} {are}{often}, all others are A's own"
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
            is_cause=True,
        )
    ]


def _original_of(pair: PairFigures, pairs: Sequence[PairFigures]) -> PairFigures | None:
    """Return the pair whose image of A this image of B is; None if there is none."""
    for other in pairs:
        if other is pair or not other.a.is_there:
            continue
        if np.abs(other.a.thumbnail - pair.b.thumbnail).mean() <= _ALIKE and are_equal(other.a, pair.b):
            return other
    return None


def _groups(pairs: Sequence[PairFigures], key: Callable[[PairFigures], object]) -> list[list[PairFigures]]:
    """Return the pairs that share a value, where several do."""
    groups: dict[object, list[PairFigures]] = {}
    for pair in pairs:
        groups.setdefault(key(pair), []).append(pair)
    return [group for group in groups.values() if len(group) > 1]


def _differ(images: Sequence[ReadImage]) -> bool:
    """Return whether images are not all the same; missing images do not count."""
    return len({image.digest for image in images if image.is_there}) > 1
