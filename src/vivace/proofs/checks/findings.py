"""Faults of B's images as a set: broken ones, and A's images of other requests.

They are observations: a cause is named only where the reference draws B's image with it, up to rounding. The worst
pairs and the map of their difference show the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vivace.answers.formatting import count
from vivace.proofs.checks.pair_figures import (
    ROUNDING_DB,
    PairFigures,
    ReadImage,
    StoredImages,
    psnr_of,
)
from vivace.proofs.sides.jobs import hypotheses
from vivace.proofs.sides.plan import ProofPlan

_NEARER_DB = 20.0
"""By how much B's image is nearer to A's of another request, if that is what B drew."""
_ALIKE = 2.0  # of 255: mean difference of thumbnails up to which two images are compared pixel by pixel

_OTHERS = ("another seed", "another prompt")


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


def find_faults(plan: ProofPlan, pairs: Sequence[PairFigures], images: StoredImages) -> list[ImageFinding]:
    return [*find_broken(pairs), *find_instead(plan, pairs, images)]


def find_broken(pairs: Sequence[PairFigures]) -> Iterator[ImageFinding]:
    """Yield the kinds of broken images that B has where A has none, holes among them."""
    by_fault: dict[str, list[PairFigures]] = {}
    for pair in pairs:
        for fault in (*pair.b.faults, *(["hole"] if pair.has_hole else [])) if not pair.a.faults else ():
            by_fault.setdefault(fault, []).append(pair)
    for fault, hit in by_fault.items():
        summary = f"{fault}: {count(len(hit), 'image')} of B"
        yield ImageFinding(summary, hit[0].label, hit[0].request, is_cause=True)


def find_instead(
    plan: ProofPlan, pairs: Sequence[PairFigures], images: StoredImages
) -> Iterator[ImageFinding]:
    """Yield what B drew instead of A's images, where A draws the same with another seed, prompt or setting."""
    hits = []
    for number, pair in enumerate(pairs):
        own_db = pair.against.get("psnr_db", 0.0)
        if not pair.is_complete or own_db >= ROUNDING_DB:
            continue
        others = [(_kind(pair, other), other.a) for other in pairs if other is not pair]
        if number == 0:
            others += [(each.words, images.image("a", each.job)) for each in hypotheses(plan)]
        least_db = max(ROUNDING_DB, own_db + _NEARER_DB)
        if kinds := [kind for kind, other in others if _is_as_near(pair.b, other, least_db)]:
            hits.append((pair, " or of ".join(dict.fromkeys(kinds))))
    if hits:
        kind = Counter(kind for _, kind in hits).most_common(1)[0][0]
        verb = "is" if len(hits) == 1 else "are"
        pair = hits[0][0]
        yield ImageFinding(
            f"instead: {count(len(hits), 'image')} of B {verb} A's of {kind}",
            pair.label,
            pair.request,
            is_cause=kind not in _OTHERS or len(hits) >= sum(each.differs for each in pairs),
        )


def _kind(pair: PairFigures, other: PairFigures) -> str:
    return _OTHERS[pair.prompt != other.prompt]


def _is_as_near(image: ReadImage, other: ReadImage, least_db: float) -> bool:
    if not other.is_there or np.abs(other.thumbnail - image.thumbnail).mean() > _ALIKE:
        return False
    return psnr_of(other, image) >= least_db
