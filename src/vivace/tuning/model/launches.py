"""Expected gain of CUDA graphs before they are tried, from the launch gaps in a trace.

A GPU that waits for the CPU to launch its kernels gains about the waiting time from a replay, which is a single launch.
The gain depends on the host, so records of captured recipes from other hosts count less where this one is slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from vivace.machinery.technique import Technique, Trait
from vivace.recipes.recipe import Recipe
from vivace.tuning.model.priors import touched_share
from vivace.tuning.model.regression import Datum
from vivace.tuning.model.utility import with_option
from vivace.tuning.search.results import Result

WAITS = 0.1
"""The logarithm of time over busy time above which a GPU counts as waiting for the CPU."""
_REPEATED = 0.02
"""Standard error of the logarithm of a busy GPU's time, which hardly differs between processes."""
_ERROR, _SHARE_OF_WAIT = 0.03, 0.1
"""Standard error of a replay's gain: a constant part, and a share of the wait."""


def captures(recipe: Iterable[Technique]) -> bool:
    """Whether a recipe's techniques replay the denoiser's launches instead of making them one by one."""
    return any(
        Trait.CAPTURED in technique.facts.provides and "denoiser" in technique.targets for technique in recipe
    )


def wait_of(result: Result, targets: Sequence[str] = ()) -> float:
    """Return the logarithm of a recipe's time over its time without launch gaps in these components; 0 if unknown.

    Args:
        targets: components; empty: all.
    """
    if result.busy_share is None:
        return 0.0
    touched = touched_share(targets, dict(result.stages_s))
    return -math.log(1 - touched * (1 - min(result.busy_share, 1.0)))


def over_the_usual_baseline(history: Sequence[Result]) -> list[Result]:
    """Return the results, with gains relative to the baseline's usual time where that is more precise.

    On a shared host, a baseline that waits for the CPU took 3.4 s in one comparison and 6.5 s in the next. A recipe
    that keeps the GPU busy takes the same time in both, so the difference between its gains is the baseline's noise.
    """
    beside = {
        round(math.log(result.seconds) + result.gain, 6)
        for result in history
        if result.seconds and result.gain is not None and not result.recipe.is_baseline
    }
    if not beside:
        return list(history)
    usual = median(beside)
    return [_over(result, usual) if _keeps_busy(result) else result for result in history]


def _keeps_busy(result: Result) -> bool:
    is_known = result.busy_share is not None and result.gain is not None and bool(result.seconds)
    return is_known and not result.recipe.is_baseline and wait_of(result) < WAITS


def _over(result: Result, usual: float) -> Result:
    assert result.seconds
    return replace(
        result,
        gain=usual - math.log(result.seconds),
        error=min(result.error, max(_REPEATED, result.own_error)),
    )


def expected_of_capturing(results: Mapping[Recipe, Result], options: Iterable[Technique]) -> list[Datum]:
    """Return the expected gain of adding a capturing option to each traced recipe, unless that was measured."""
    capturing = [option for option in options if captures((option,))]
    expected = {}
    for recipe, result in results.items():
        if result.gain is None or result.busy_share is None or captures(recipe):
            continue
        for option in capturing:
            captured = with_option(recipe, option)
            if captured is not None and captured not in results:
                wait = wait_of(result, option.targets)
                error = math.hypot(result.error, _ERROR + _SHARE_OF_WAIT * wait)
                expected[captured] = Datum(captured, result.gain + wait, error)
    return list(expected.values())


def as_of_another_host(data: Iterable[Datum], wait: float) -> list[Datum]:
    """Return records with a larger error for captured recipes whose host had other launch gaps.

    Args:
        wait: of the baseline on this host; see `wait_of`.
    """
    return [replace(datum, error=datum.error + wait) if captures(datum.recipe) else datum for datum in data]
