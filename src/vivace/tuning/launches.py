"""What is known of capturing launches before it is tried: in a trace the GPU's waits for the CPU can be seen.

A GPU that waits for the CPU to launch its kernels gains from a replay, which is one launch, about the time that it
waits. That depends on the host, so what another host's records say of captured recipes counts less where this one is
slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from vivace.contract import Technique, Trait
from vivace.recipes.recipe import Recipe
from vivace.tuning.belief import Datum
from vivace.tuning.priors import touched_share
from vivace.tuning.seen import Seen
from vivace.tuning.worth import with_option

WAITS = 0.1
"""The logarithm of the time over the busy time from which a GPU counts as waiting for the CPU."""
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
