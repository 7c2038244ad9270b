"""What is known of capturing launches before it is tried: in a trace the GPU's waits for the CPU can be seen.

A GPU that waits for the CPU to launch its kernels gains from a replay, which is one launch, about the time that it
waits. That depends on the host, so what another host's records say of captured recipes counts less where this one is
slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from vivace.contract import Technique, Trait
from vivace.recipes.recipe import Recipe
from vivace.tuning.belief import Datum
from vivace.tuning.priors import touched_share
from vivace.tuning.seen import Seen
from vivace.tuning.worth import with_option

WAITS = 0.1
"""The logarithm of the time over the busy time from which a GPU counts as waiting for the CPU."""
_REPEATED = 0.02
"""Standard error of the logarithm of a busy GPU's time: between processes it hardly changes."""
_ERROR, _SHARE_OF_WAIT = 0.03, 0.1
"""Standard error of what a replay gains: a part that it always has, and a share of the wait."""


def captures(recipe: Iterable[Technique]) -> bool:
    """Whether a recipe's techniques replay the denoiser's launches instead of making them one by one."""
    return any(
        Trait.CAPTURED in technique.provides and "denoiser" in technique.targets for technique in recipe
    )


def wait_of(one: Seen, targets: Sequence[str] = ()) -> float:
    """Return the logarithm of a recipe's time over what it would be without waits in these components; 0 if unknown.

    Args:
        targets: components; empty: all.
    """
    if one.busy_share is None:
        return 0.0
    touched = touched_share(targets, dict(one.stages_s))
    return -math.log(1 - touched * (1 - min(one.busy_share, 1.0)))


def over_the_usual_baseline(history: Sequence[Seen]) -> list[Seen]:
    """Return the results with the gain over the baseline's usual time where that tells more than the time beside it.

    A baseline that waits for the CPU takes 3.4 s in one comparison and 6.5 in the next on a shared host. A recipe that
    keeps the GPU busy takes the same each time, so its gain over the baseline beside it is the baseline's noise.
    """
    beside = {
        round(math.log(one.seconds) + one.gain, 6)
        for one in history
        if one.seconds and one.gain is not None and not one.recipe.is_baseline
    }
    if not beside:
        return list(history)
    usual = median(beside)
    return [_over(one, usual) if _keeps_busy(one) else one for one in history]


def _keeps_busy(one: Seen) -> bool:
    is_known = one.busy_share is not None and one.gain is not None and bool(one.seconds)
    return is_known and not one.recipe.is_baseline and wait_of(one) < WAITS


def _over(one: Seen, usual: float) -> Seen:
    assert one.seconds
    return replace(
        one, gain=usual - math.log(one.seconds), error=min(one.error, max(_REPEATED, one.own_error))
    )


def expected_of_capturing(results: Mapping[Recipe, Seen], options: Iterable[Technique]) -> list[Datum]:
    """Return the gain of each traced recipe that does not capture, with an option that does; measured ones left out."""
    capturing = [option for option in options if captures((option,))]
    found = {}
    for recipe, one in results.items():
        if one.gain is None or one.busy_share is None or captures(recipe):
            continue
        for option in capturing:
            captured = with_option(recipe, option)
            if captured is not None and captured not in results:
                wait = wait_of(one, option.targets)
                error = math.hypot(one.error, _ERROR + _SHARE_OF_WAIT * wait)
                found[captured] = Datum(captured, one.gain + wait, error)
    return list(found.values())


def as_of_another_host(data: Iterable[Datum], wait: float) -> list[Datum]:
    """Return records with the error that captured recipes have whose host waited for another time.

    Args:
        wait: of the baseline on this host; see `wait_of`.
    """
    return [replace(one, error=one.error + wait) if captures(one.recipe) else one for one in data]
