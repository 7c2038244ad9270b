"""Speed-up: the ratio of medians, paired by round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vivace.foundation.stats.intervals import (
    DEFAULT_SPREAD,
    MIN_SAMPLES,
    Interval,
    LogMean,
    Spread,
    log_error,
    mean_over_rounds,
)


def speedup(
    baseline: Sequence[Sequence[float]], other: Sequence[Sequence[float]], spread: Spread = DEFAULT_SPREAD
) -> Interval:
    """Return the baseline's time over the other's: the geometric mean over rounds with a 95 % interval.

    Args:
        baseline, other: seconds by round, in the same order of rounds. Rounds that are empty in either are left out.
    """
    return log_speedup(baseline, other, spread).interval()


def log_speedup(
    baseline: Sequence[Sequence[float]], other: Sequence[Sequence[float]], spread: Spread = DEFAULT_SPREAD
) -> LogMean:
    """Return the logarithm of the speed-up.

    Rounds are interleaved, so a slow phase of the machine affects both, and their ratio is what each round tells.

    Args:
        baseline, other: see `speedup`.
    """
    logs, errors = pair_logs(baseline, other)
    return mean_over_rounds(logs, errors, 2 * spread.sd**2, spread.dof)


def pair_logs(
    baseline: Sequence[Sequence[float]], other: Sequence[Sequence[float]]
) -> tuple[list[float], list[float] | None]:
    """Return the logarithm of each round's speed-up and their standard errors; no errors if there are too few samples.

    Args:
        baseline, other: see `speedup`.
    """
    pairs = [(b, o) for b, o in zip(baseline, other, strict=False) if len(b) and len(o)]
    if not pairs:
        raise ValueError("no round in which both were measured")
    logs = [float(np.log(np.median(b) / np.median(o))) for b, o in pairs]
    enough = min(sum(len(b) for b, _ in pairs), sum(len(o) for _, o in pairs)) >= MIN_SAMPLES
    return logs, [float(np.hypot(log_error(b), log_error(o))) for b, o in pairs] if enough else None
