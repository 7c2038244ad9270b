"""Speed-up: the ratio of medians, paired by round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vivace.stats.intervals import MIN_SAMPLES, NUM_RESAMPLES, Interval, resampled_medians


def speedup(baseline: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> Interval:
    """Return the baseline's time over the other's: the geometric mean over rounds with a 95 % interval.

    Rounds are interleaved, so a slow phase of the machine affects both. The bootstrap resamples rounds, and samples
    within each round.

    Args:
        baseline, other: seconds by round, in the same order of rounds. Rounds that are empty in either are left out.
    """
    pairs = [(b, o) for b, o in zip(baseline, other, strict=False) if len(b) and len(o)]
    if not pairs:
        raise ValueError("no round in which both were measured")
    logs = [float(np.log(np.median(b) / np.median(o))) for b, o in pairs]
    point = float(np.exp(np.mean(logs)))
    if min(sum(len(b) for b, _ in pairs), sum(len(o) for _, o in pairs)) < MIN_SAMPLES:
        return Interval(point, None, None)
    generator = np.random.default_rng(0)
    by_round = np.stack(
        [np.log(resampled_medians(b, generator) / resampled_medians(o, generator)) for b, o in pairs]
    )
    picks = generator.integers(0, len(pairs), size=(len(pairs), NUM_RESAMPLES))
    resampled = np.take_along_axis(by_round, picks, axis=0).mean(axis=0)
    low, high = np.exp(np.percentile(resampled, [2.5, 97.5]))
    return Interval(point, float(low), float(high))
