"""Fast? The seconds of B's images beside A's of the same prompt, seed and size, from the run that drew them.

The first image of each size after a side is opened is a warm-up and has no seconds. A is drawn before B, so the images
of one prompt, not of one moment, are paired. A server's seconds hold encoding and transfer, as its users wait for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from vivace.proofs.figures import PairFigures
from vivace.proofs.side_loads import SideLoad
from vivace.proofs.sides import ComfySide, FolderSide
from vivace.proofs.sources import Prepared
from vivace.proofs.verdict import ProofAnswer, ProofVerdict
from vivace.report.value_text import count
from vivace.stats import Equivalence, EquivalenceTest, equivalence

MARGIN = math.log(1.05)
"""Of the logarithm of the ratio: up to 5 % more time is not slower."""
_LEAST_S = 1e-6


@dataclass(frozen=True)
class Speed:
    """The answer, and what it rests on.

    Attributes:
        a_s, b_s: median seconds an image; None if they were not measured.
        test: of the logarithms of B's seconds over A's.
        loads: the endpoints under load.
    """

    answer: ProofAnswer
    num_pairs: int = 0
    a_s: float | None = None
    b_s: float | None = None
    test: EquivalenceTest | None = None
    loads: tuple[SideLoad, ...] = ()


def speed(pairs: Sequence[PairFigures], untimed: str | None, loads: Sequence[SideLoad] = ()) -> Speed:
    """Return whether B's images take no longer than A's.

    Args:
        untimed: why there are no seconds; None if there are.
    """
    if untimed is not None:
        return Speed(ProofAnswer(ProofVerdict.LEFT_OUT, untimed), loads=tuple(loads))
    timed = [
        (pair.prompt, pair.a.kept.seconds, pair.b.kept.seconds)
        for pair in pairs
        if pair.a.kept.seconds is not None and pair.b.kept.seconds is not None
    ]
    if not timed:
        reason = "no pair of images beyond the first, which is a warm-up"
        return Speed(ProofAnswer(ProofVerdict.UNCLEAR, reason), loads=tuple(loads))
    changes = [math.log(max(b, _LEAST_S) / max(a, _LEAST_S)) for _, a, b in timed]
    test = equivalence(changes, [prompt for prompt, _, _ in timed], MARGIN)
    a_s, b_s = median(a for _, a, _ in timed), median(b for _, _, b in timed)
    return Speed(_answer(test, a_s, b_s), len(timed), a_s, b_s, test, tuple(loads))


def untimed(prepared: Prepared) -> str | None:
    """Return why the latency of a side is not known; None if it is."""
    for source in (prepared.a, prepared.b):
        if isinstance(source.side, FolderSide):
            return f"{source.side.text} is a folder, of which nothing says how long its images took"
        if isinstance(source.side, ComfySide):
            return "a ComfyUI server is asked once a second whether it is done, which is too coarse"
    return None


def ratio_in_words(test: EquivalenceTest) -> str:
    """Return B's time over A's with its 90 % interval, e.g. ×0.61 [×0.60, ×0.62]."""
    low, high = test.interval.low, test.interval.high
    ends = "" if low is None or high is None else f" [×{math.exp(low):.2f}, ×{math.exp(high):.2f}]"
    return f"×{math.exp(test.interval.point):.2f}{ends}"


def seconds_in_words(seconds: float) -> str:
    """Return seconds with three digits that count."""
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"


def _answer(test: EquivalenceTest, a_s: float, b_s: float) -> ProofAnswer:
    medians = f"median {seconds_in_words(b_s)} instead of {seconds_in_words(a_s)} an image"
    times = f"B takes {ratio_in_words(test)} A's time, {medians}"
    if test.verdict is Equivalence.ABOVE:
        return ProofAnswer(ProofVerdict.FAILED, times)
    # What is surely not slower need not be shown to be no faster.
    if test.verdict is not Equivalence.UNCLEAR or (
        test.interval.high is not None and test.interval.high < MARGIN
    ):
        return ProofAnswer(ProofVerdict.PROVEN, times)
    if test.needed is None:
        return ProofAnswer(ProofVerdict.UNCLEAR, f"{times}, too close to the margin of 5 %")
    return ProofAnswer(ProofVerdict.UNCLEAR, f"{times}; about {count(test.needed, 'prompt')} would tell")
