"""Fast? The seconds of B's images beside A's of the same prompt, seed and size, from the run that drew them.

The first image of each size after a side is opened is a warm-up and has no seconds. A is drawn before B, and a machine
gets warmer or busier meanwhile; so for the claim A is drawn again after B, and the answer must hold for both. A
server's seconds include encoding and transfer, since its users wait for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from vivace.answers.formatting import count
from vivace.foundation.stats import Equivalence, EquivalenceTest, equivalence
from vivace.proofs.checks.pair_figures import PairFigures
from vivace.proofs.checks.side_loads import SideLoad
from vivace.proofs.verdicts.verdict import ProofAnswer, ProofVerdict, decide

MARGIN = math.log(1.05)
"""Margin of the logarithm of the ratio: up to 5 % more time is not slower."""
_LEAST_S = 1e-6


@dataclass(frozen=True)
class SpeedAnswer:
    """The answer, with its evidence.

    Attributes:
        a_s, b_s: median seconds an image; None if they were not measured.
        test: of the logarithms of B's seconds over A's.
        after: the same against A's when it was drawn again after B.
        loads: the endpoints under load.
    """

    answer: ProofAnswer
    num_pairs: int = 0
    a_s: float | None = None
    b_s: float | None = None
    test: EquivalenceTest | None = None
    after: EquivalenceTest | None = None
    loads: tuple[SideLoad, ...] = ()


def speed(
    pairs: Sequence[PairFigures],
    untimed: str,
    a_again: Sequence[float | None] | None = None,
    loads: Sequence[SideLoad] = (),
) -> SpeedAnswer:
    """Return whether B's images take no longer than A's.

    Args:
        untimed: the reason for missing seconds; "" if there is none.
        a_again: A's seconds when it was drawn again after B, of each pair; None if it was not.
    """
    if untimed:
        return SpeedAnswer(ProofAnswer(ProofVerdict.LEFT_OUT, untimed), loads=tuple(loads))
    timed = [
        (pair.prompt, a, b, again)
        for pair, again in zip(pairs, a_again or [None] * len(pairs), strict=True)
        if (a := pair.a.kept.seconds) is not None
        and (b := pair.b.kept.seconds) is not None
        and (a_again is None or again is not None)
    ]
    if not timed:
        reason = "no pair of images beyond the first, which is a warm-up"
        return SpeedAnswer(ProofAnswer(ProofVerdict.UNCLEAR, reason), loads=tuple(loads))
    prompts = [prompt for prompt, *_ in timed]
    before = _test([(a, b) for _, a, b, _ in timed], prompts)
    a_s, b_s = median(a for _, a, _, _ in timed), median(b for _, _, b, _ in timed)
    medians = f"median {seconds_in_words(b_s)} instead of {seconds_in_words(a_s)} an image"
    if a_again is None:
        times = f"B takes {ratio_in_words(before)} A's time, {medians}"
        reason = f"{times}; A was drawn before B, and --claim fast draws it again after B"
        answer = ProofAnswer(ProofVerdict.LEFT_OUT, reason)
        return SpeedAnswer(answer, len(timed), a_s, b_s, before, loads=tuple(loads))
    after = _test([(again or 0.0, b) for _, _, b, again in timed], prompts)
    num_untimed = len({pair.prompt for pair in pairs}) - before.num_groups
    answer = _answer(before, after, medians, num_untimed)
    return SpeedAnswer(answer, len(timed), a_s, b_s, before, after, tuple(loads))


def ratio_in_words(test: EquivalenceTest) -> str:
    """Return B's time over A's with its 90 % interval, e.g. ×0.61 [×0.60, ×0.62]."""
    low, high = test.interval.low, test.interval.high
    ends = "" if low is None or high is None else f" [×{math.exp(low):.2f}, ×{math.exp(high):.2f}]"
    return f"×{math.exp(test.interval.point):.2f}{ends}"


def seconds_in_words(seconds: float) -> str:
    """Return seconds with three digits that count."""
    if seconds < 0.1:
        return f"{1000 * seconds:#.3g} ms"
    return f"{seconds:#.3g} s" if seconds < 100 else f"{seconds:.0f} s"


def _test(seconds: Sequence[tuple[float, float]], prompts: Sequence[str]) -> EquivalenceTest:
    """Test B's seconds, the second of each pair, against A's."""
    changes = [math.log(max(b, _LEAST_S) / max(a, _LEAST_S)) for a, b in seconds]
    return equivalence(changes, prompts, MARGIN)


def _is_no_slower(test: EquivalenceTest) -> bool:
    # A side that is certainly not slower need not be shown to be no faster.
    is_surely = test.interval.high is not None and test.interval.high < MARGIN
    return is_surely or test.verdict in (Equivalence.WITHIN, Equivalence.BELOW)


def _answer(before: EquivalenceTest, after: EquivalenceTest, medians: str, num_untimed: int) -> ProofAnswer:
    """Return the answer, which holds for A as drawn before B and after it.

    Args:
        num_untimed: prompts whose only image is a warm-up, or failed.
    """
    times = f"B takes {ratio_in_words(before)} A's time before it and {ratio_in_words(after)} A's after it, {medians}"
    drift = before.interval.point - after.interval.point
    needed = max((test.needed for test in (before, after) if test.needed is not None), default=0)
    is_slower = before.verdict is after.verdict is Equivalence.ABOVE
    changed = f"{times}; A's own time changed by ×{math.exp(drift):.2f}, so the machine is busy or throttles"
    would_tell = f"{times}; about {count(needed + num_untimed, 'prompt')} would tell"
    return decide(
        (is_slower, ProofVerdict.FAILED, times),
        (_is_no_slower(before) and _is_no_slower(after), ProofVerdict.PROVEN, times),
        (abs(drift) > MARGIN, ProofVerdict.UNCLEAR, changed),
        (not needed, ProofVerdict.UNCLEAR, f"{times}, too close to the margin of 5 %"),
        (True, ProofVerdict.UNCLEAR, would_tell),
    )
