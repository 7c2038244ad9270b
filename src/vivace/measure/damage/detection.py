"""The strength from which damage is detected."""

from __future__ import annotations

import math
from collections.abc import Sequence

POWER = 0.9


def least_detected(powers: Sequence[float], strengths: Sequence[float], power: float = POWER) -> float | None:
    """Return the lowest strength from which damage is detected with this power; None if it never is.

    Between two strengths the power is interpolated over their logarithms. If the lowest is detected already, it is
    returned: an upper bound.

    Args:
        powers: the probability that damage is detected at each strength.
        strengths: positive and growing.
    """
    for k, reached in enumerate(powers):
        if min(powers[k:]) < power:
            continue
        if k == 0:
            return strengths[0]
        below, low, high = powers[k - 1], math.log(strengths[k - 1]), math.log(strengths[k])
        return math.exp(low + (power - below) / (reached - below) * (high - low))
    return None
