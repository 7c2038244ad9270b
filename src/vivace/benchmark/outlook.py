"""Predict whether a comparison by pairs can reach a verdict in its time, before it starts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from vivace.foundation.spec.record import Outcome, Round
from vivace.foundation.spec.timing import Timing
from vivace.foundation.stats.sequential import looks

_RECIPES, _CANARY = 2, 0.5
"""What runs in a pair: a round of each recipe, and a canary, which takes about half of one."""


def outlook(
    max_s: float, num_pairs: int, max_pairs: int, pair_s: float | None, timing: Timing, *, begun: bool = False
) -> str | None:
    """Return a warning if no verdict can, or may, be reached in time; None if one is likely.

    Args:
        max_s: seconds after which no pair is begun.
        num_pairs: existing pairs; the next look at them may decide.
        pair_s: seconds of a pair; None if it is not known yet.
        begun: whether the last of them has been measured within this time, `pair_s` ago.
    """
    steps = looks(max_pairs)
    left = [step for step in steps if step > num_pairs]
    if not left or (num_pairs in steps and not begun):
        return None  # the existing pairs may decide
    missing = left[0] - num_pairs
    before_last = missing - 1 + int(begun)
    if pair_s is not None:
        if before_last * pair_s < max_s:
            return None
        return (
            f"a verdict needs {left[0]} pairs, {missing} more than there are, and a "
            f"pair takes about {pair_s:.0f} s: "
            f"--max-minutes {max_s / 60:g} ends before; give --max-minutes {_minutes(before_last * pair_s)} or more"
        )
    if timing.repeats is not None:
        return None  # a call may be short
    longest_s = _RECIPES * 2 * timing.max_seconds  # warm-up and timed calls
    if before_last * longest_s < max_s:
        return None
    return (
        f"a verdict needs {left[0]} pairs, and a pair takes up to {longest_s:.0f} s and more: --max-minutes "
        f"{max_s / 60:g} may end before; give --max-minutes {_minutes(before_last * longest_s)} or more"
    )


def pair_seconds(rounds: Sequence[Sequence[Round]]) -> float | None:
    """Estimate the seconds of a pair from stored rounds of both recipes; None without any.

    It includes the rounds' calls and loading, but not the start of a process.
    """
    each = [
        statistics.median(measured)
        for rounds_of_recipe in rounds
        if (
            measured := [
                _seconds(round_) for round_ in rounds_of_recipe if round_.outcome is Outcome.MEASURED
            ]
        )
    ]
    return (_RECIPES + _CANARY) * statistics.mean(each) if each else None


def _seconds(round_: Round) -> float:
    parts = [
        round_.load_s,
        round_.apply_s,
        round_.first_call_s,
        *(sample.total_s for sample in round_.samples),
    ]
    return sum(part for part in parts if part is not None) + sum(round_.warmup_s)


def _minutes(seconds: float) -> int:
    return math.ceil(1.2 * seconds / 60)
