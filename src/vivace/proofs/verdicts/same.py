"""Same image? The distances of B's images to A's, compared with the distances among A's own.

itself     as near as the reference is to itself: as its own repetition, or different by rounding alone
another    another picture (see `report.other_pictures`), as far away as what another seed draws: less than half-way
           from there to the reference
near       the reference's contrast is reproduced (`match` of 0.9 or more)
changed    between near and another
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from vivace.answers.formatting import count
from vivace.foundation.stats import EquivalenceTest, mean_interval
from vivace.measure.scorer import Lpips
from vivace.proofs.checks.pair_figures import AGAINST, NEAR, ROUNDING_DB, Nearness, PairFigures, StoredImages
from vivace.proofs.sides.plan import ProofPlan
from vivace.proofs.sides.side import DrawJob
from vivace.report.fidelity import other_pictures

_CLOSER_BY_DB = 1.0
_DEFAULT_OTHER = 0.0
_MOST_NAMED = 3
Metrics = dict[str, float]


class ProofVerdict(StrEnum):
    PROVEN = "proven"
    FAILED = "failed"
    UNCLEAR = "cannot tell"
    LEFT_OUT = "not checked"


@dataclass(frozen=True)
class ProofAnswer:
    """The verdict on a question, and the reason as part of a sentence."""

    verdict: ProofVerdict
    reason: str

    @property
    def word(self) -> str:
        """The answer to the question, e.g. "yes" or "cannot tell"."""
        return {ProofVerdict.PROVEN: "yes", ProofVerdict.FAILED: "no"}.get(self.verdict, self.verdict.value)


def decide(*rules: tuple[object, ProofVerdict, str]) -> ProofAnswer:
    """Return the verdict and the reason of the first rule whose condition holds; that of the last must."""
    return next(ProofAnswer(verdict, reason) for holds, verdict, reason in rules if holds)


def difference_in_words(test: EquivalenceTest, in_words: Callable[[float], str], unit: str = "") -> str:
    low, high = test.interval.low, test.interval.high
    ends = "" if low is None or high is None else f" [{in_words(low)}, {in_words(high)}]"
    return f"{in_words(test.interval.point)}{unit}{ends}"


@dataclass(frozen=True)
class OwnDistances:
    """Metrics of images that A drew a second time, if it can, and of its images against those of another seed."""

    repeats: tuple[Metrics, ...] = ()
    other_seeds: tuple[Metrics, ...] = ()

    @classmethod
    def of(cls, plan: ProofPlan, images: StoredImages, lpips: Lpips | None) -> OwnDistances:
        by_prompt: dict[object, list[DrawJob]] = {}
        for job in plan.main_jobs + plan.other_seed_jobs:
            by_prompt.setdefault((job.prompt, job.settings), []).append(job)
        others = itertools.chain.from_iterable(itertools.pairwise(jobs) for jobs in by_prompt.values())

        def metrics(jobs: Iterable[tuple[DrawJob, DrawJob]]) -> tuple[Metrics, ...]:
            pairs = (PairFigures.of(a, images.image("a", a), images.image("a", b), lpips) for a, b in jobs)
            return tuple(pair.against for pair in pairs if pair.against)

        return cls(
            metrics((replace(job, repeat=0), job) for job in plan.own_repeat_jobs),
            metrics(itertools.islice(others, 2 * len(by_prompt))),
        )

    @property
    def repeats_exactly(self) -> bool:
        """Whether the reference draws the same image twice, as far as it was tried."""
        return all(math.isinf(m["psnr_db"]) for m in self.repeats)

    @property
    def another_below(self) -> float:
        """The match below which an image is nearer to another seed's."""
        values = [m["match"] for m in self.other_seeds]
        other = sum(values) / len(values) if values else _DEFAULT_OTHER
        return min(NEAR, (1 + other) / 2)


def add_nearness(pairs: Sequence[PairFigures], own: OwnDistances) -> None:
    """Set how near the image of each pair is, and whether it has a hole."""
    repeat_db = min((m["psnr_db"] for m in own.repeats), default=math.inf)
    compared = [pair for pair in pairs if pair.against]
    others = other_pictures(
        [pair.against["match"] for pair in compared],
        [pair.b.thumbnail for pair in compared],
        [pair.a.thumbnail for pair in compared],
        own.another_below,
    )
    draws_rectangles = any(pair.a.num_rectangles for pair in pairs)
    for k, pair in enumerate(compared):
        pair.has_hole |= pair.num_rectangles > 0 and not draws_rectangles
        if pair.against["psnr_db"] >= min(ROUNDING_DB, repeat_db - _CLOSER_BY_DB):
            pair.nearness = Nearness.ITSELF
        elif k in others:
            pair.nearness = Nearness.ANOTHER
        else:
            pair.nearness = Nearness.NEAR if pair.against["match"] >= NEAR else Nearness.CHANGED


def means(metrics: Sequence[Metrics]) -> Metrics:
    """Return the mean of each metric; infinite PSNRs are left out unless all are."""
    result = {}
    for name in AGAINST:
        values = [m[name] for m in metrics if name in m]
        finite = [value for value in values if not math.isinf(value)]
        if values:
            result[name] = sum(finite) / len(finite) if finite else math.inf
    return result


def worst_pairs(pairs: Sequence[PairFigures]) -> list[PairFigures]:
    """Return the pairs that are not near, or have a hole, the worst first."""
    off = [pair for pair in pairs if pair.against and (pair.differs or pair.has_hole)]
    return sorted(off, key=lambda pair: pair.against["match"])[:_MOST_NAMED]


def same_picture(pairs: Sequence[PairFigures]) -> ProofAnswer:
    """Return whether B draws the same images as A. One that is another image, or has a hole, is enough for no."""
    compared = [pair for pair in pairs if pair.against]
    if not compared:
        reasons = (pair.reason or pair.a.reason or pair.b.reason for pair in pairs)
        missing = next((reason for reason in reasons if reason), "no pair of images to compare")
        return ProofAnswer(ProofVerdict.UNCLEAR, missing)
    counts = Counter(pair.nearness for pair in compared)
    num_holes, worst = sum(pair.has_hole for pair in compared), worst_pairs(pairs)
    summary = f"of {count(len(compared), 'image')}: " + ", ".join(
        f"{counts[level]} {level.value}" for level in Nearness if counts[level]
    )
    summary += f"; {num_holes} with a hole" if num_holes else ""
    named = ", ".join(f"{pair.label} (match {pair.against['match']:.2f})" for pair in worst)
    summary += f"; the worst: {named}" if worst else ""
    what = "every image" if len(compared) > 1 else "the image"
    itself = f"{what} ({len(compared)}) is as near as the reference is to itself"
    matches = [pair.against["match"] for pair in compared]
    interval = mean_interval(matches, [pair.prompt for pair in compared], 0.9)
    return decide(
        (num_holes or counts[Nearness.ANOTHER], ProofVerdict.FAILED, summary),
        (counts[Nearness.ITSELF] == len(compared), ProofVerdict.PROVEN, itself),
        (not counts[Nearness.CHANGED], ProofVerdict.PROVEN, summary),
        (interval.high is not None and interval.high < NEAR, ProofVerdict.FAILED, summary),
        (interval.low is not None and interval.low >= NEAR, ProofVerdict.PROVEN, summary),
        (True, ProofVerdict.UNCLEAR, f"{summary}; give more prompts"),
    )
