"""The recipes of a final, chosen by posterior samples of their gains (`Sampler.values`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOST_USEFUL = 3
"""Number of recipes in a final, any of which may be the fastest."""
SURE = 0.95
"""Probability that at least one finalist must pass, while there is no answer yet."""
MOST = 5
"""Finalists at most: each is fast, and the baseline's images are drawn once for all."""
_OF_A_PATH = 2
_WORTH_A_PLACE = 0.005
"""Expected improvement that a further finalist must add."""
_MORE_LIKELY = 0.05
"""Increase in the probability that one passes that a further finalist must bring."""


def useful(samples: NDArray[np.float64], floor: float, number: int, least: float) -> list[int]:
    """Choose finalists greedily by expected improvement over posterior samples.

    Args:
        samples: gains (samples, candidates), no more than `floor` where a candidate does not pass.
        floor: the gain that a proposal has to exceed.
        least: the improvement that the first candidate must add.
    """
    reached = np.full(len(samples), floor)
    chosen: list[int] = []
    while len(chosen) < min(number, samples.shape[1]):
        more = np.maximum(samples - reached[:, None], 0.0).mean(axis=0)
        which = int(np.argmax(more))
        if which in chosen or more[which] <= least:
            break
        chosen.append(which)
        least = max(least, _WORTH_A_PLACE)
        reached = np.maximum(reached, samples[:, which])
    return chosen


def best_of_each(samples: NDArray[np.float64], paths: Sequence[object]) -> list[int]:
    """Return the candidates without those of a path of which two promise more, as all of a path pass or fail together.

    Args:
        samples: see `useful`.
        paths: of the candidates; None for one of its own.
    """
    best: list[int] = []
    for k in np.argsort(-samples.mean(axis=0)):
        if paths[k] is None or sum(paths[other] == paths[k] for other in best) < _OF_A_PATH:
            best.append(int(k))
    return best


def portfolio(samples: NDArray[np.float64], least: float, chosen: Sequence[int]) -> list[int]:
    """Return the chosen candidates with others, until one of them passes and is faster in 95 % of the samples.

    The safest comes first: where time is short, a final leaves out the last ones.

    Args:
        samples: see `useful`.
        least: the smallest gain that a final can prove.
    """
    passes: NDArray[np.bool_] = np.asarray(samples > least)
    final = list(chosen)
    held: NDArray[np.bool_] = np.asarray(passes[:, final].any(axis=1))
    while held.mean() < SURE and len(final) < min(MOST, samples.shape[1]):
        more = (passes & ~held[:, None]).mean(axis=0)
        which = int(np.argmax(more))
        if more[which] < _MORE_LIKELY:
            break
        final.append(which)
        held |= passes[:, which]
    return sorted(final, key=lambda k: -passes[:, k].mean())
