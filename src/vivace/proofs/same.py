"""Same image? The distances of B's images to A's, compared with the distances among A's own.

itself     as near as the reference is to itself: as its own repetition, or different by rounding alone
near       the reference's contrast is reproduced (`match` of 0.9 or more)
changed    between near and another
another    nearer to what another seed draws: less than half-way from there to the reference
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from vivace.foundation.spec.limits import DEFAULT_LIMITS
from vivace.foundation.stats import mean_interval
from vivace.proofs.pair_figures import AGAINST, PairFigures
from vivace.proofs.verdict import ProofAnswer, ProofVerdict
from vivace.report.value_text import count

ROUNDING_DB = 48.0
"""PSNR from which only the last bit of 8 differs: an error of one level in every value has 48.1 dB."""
_CLOSER_BY_DB = 1.0
_DEFAULT_OTHER = 0.0
_FEW = 0.05
"""Share of images that may be changed where all others are near."""


class Nearness(StrEnum):
    """How near an image is to the reference's."""

    ITSELF = "as near as the reference is to itself"
    NEAR = "near"
    CHANGED = "changed"
    ANOTHER = "another image"


@dataclass(frozen=True)
class OwnDistances:
    """The reference's own distances.

    Attributes:
        repeats: metrics of images that A drew a second time; empty if it cannot, as a folder.
        other_seeds: of A's images against those of the same prompt and another seed.
    """

    repeats: tuple[dict[str, float], ...] = ()
    other_seeds: tuple[dict[str, float], ...] = ()

    @property
    def repeats_exactly(self) -> bool | None:
        """Whether the reference draws the same image twice; None if it was not tried."""
        return all(math.isinf(m["psnr_db"]) for m in self.repeats) if self.repeats else None

    @property
    def another_below(self) -> float:
        """The match below which an image is nearer to another seed's."""
        values = [m["match"] for m in self.other_seeds]
        other = sum(values) / len(values) if values else _DEFAULT_OTHER
        return min(_near(), (1 + other) / 2)


def nearness(against: dict[str, float], own: OwnDistances) -> Nearness:
    """Return how near an image with these metrics is."""
    repeat_db = min((m["psnr_db"] for m in own.repeats), default=math.inf)
    if against["psnr_db"] >= min(ROUNDING_DB, repeat_db - _CLOSER_BY_DB):
        return Nearness.ITSELF
    if against["match"] >= _near():
        return Nearness.NEAR
    return Nearness.ANOTHER if against["match"] < own.another_below else Nearness.CHANGED


def means(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric; infinite PSNRs are left out unless all are."""
    result = {}
    for name in AGAINST:
        values = [m[name] for m in metrics if name in m]
        finite = [value for value in values if not math.isinf(value)]
        if values:
            result[name] = sum(finite) / len(finite) if finite else math.inf
    return result


def same_picture(pairs: Sequence[PairFigures], own: OwnDistances) -> ProofAnswer:
    """Return whether B draws the same images as A."""
    compared = [pair for pair in pairs if pair.against]
    if not compared:
        reasons = (pair.reason or pair.a.reason or pair.b.reason for pair in pairs)
        reason = next((reason for reason in reasons if reason), "no pair of images to compare")
        return ProofAnswer(ProofVerdict.UNCLEAR, reason)
    levels = [nearness(pair.against, own) for pair in compared]
    counts = Counter(levels)
    listed = ", ".join(f"{counts[level]} {level.value}" for level in Nearness if counts[level])
    summary = f"of {count(len(levels), 'image')}: {listed}"
    off = counts[Nearness.ANOTHER] + counts[Nearness.CHANGED]
    if not off:
        what = "every image" if len(levels) > 1 else "the image"
        if counts[Nearness.ITSELF] == len(levels):
            return ProofAnswer(
                ProofVerdict.PROVEN, f"{what} ({len(levels)}) is as near as the reference is to itself"
            )
        return ProofAnswer(ProofVerdict.PROVEN, summary)
    interval = mean_interval(
        [pair.against["match"] for pair in compared], [pair.prompt for pair in compared], 0.9
    )
    if counts[Nearness.ANOTHER] > _FEW * len(levels) or (
        interval.high is not None and interval.high < _near()
    ):
        return ProofAnswer(ProofVerdict.FAILED, summary)
    if interval.low is not None and interval.low >= _near():
        return ProofAnswer(ProofVerdict.PROVEN, summary)
    return ProofAnswer(ProofVerdict.UNCLEAR, f"{summary}; give more prompts")


def _near() -> float:
    limit = DEFAULT_LIMITS.match
    assert limit is not None
    return limit
