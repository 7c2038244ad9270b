"""Differences between processes that do the same, estimated from the rounds of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vivace.foundation.stats.intervals import DEFAULT_SPREAD, Spread, log_error

_MOST_DOF = 12
"""Most degrees of freedom: the processes of recipes may differ by different amounts, so each row's own rounds must
count."""


def learn_spread(
    trials: Sequence[Mapping[int, Sequence[float]]],
    prior: Spread = DEFAULT_SPREAD,
    moves: Sequence[float] = (),
) -> Spread:
    """Return the prior, corrected by trials measured side by side, and by the machine's movement.

    What remains of the rounds' medians beyond a trial's own level and the machine's speed in each round is the
    difference between processes, once the error of the medians themselves is taken off.

    Args:
        trials: samples by round of each trial, the first one's rounds deciding which count.
        moves: logarithmic changes of one recipe's time within rounds, from one of its processes to the next. Each is
            the difference of two processes, and of the machine between them, so it tells of both.
    """
    prior = _moved(prior, moves)
    if not trials:
        return prior
    rounds = sorted(trials[0])
    shared = [trial for trial in trials if set(rounds) <= set(trial)]
    dof = (len(shared) - 1) * (len(rounds) - 1)
    if (
        len(shared) < 3 or dof == 0
    ):  # two trials tell no more than their own ratios, which count by themselves
        return prior
    logs = np.log([[float(np.median(trial[r])) for r in rounds] for trial in shared])
    rest = logs - logs.mean(axis=0) - logs.mean(axis=1, keepdims=True) + logs.mean()
    within = float(np.mean([log_error(trial[r]) ** 2 for trial in shared for r in rounds]))
    variance = max(0.0, float((rest**2).sum()) / dof - within)
    learnt = min(dof, _MOST_DOF)
    together = (prior.dof * prior.sd**2 + learnt * variance) / (prior.dof + learnt)
    return Spread(together**0.5, prior.dof + learnt)


def _moved(prior: Spread, moves: Sequence[float]) -> Spread:
    if not moves:
        return prior
    learnt = min(len(moves), _MOST_DOF)
    variance = float(np.mean(np.square(moves))) / 2
    together = (prior.dof * prior.sd**2 + learnt * variance) / (prior.dof + learnt)
    return Spread(together**0.5, prior.dof + learnt)
