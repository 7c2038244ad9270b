"""Compare two recipes pair by pair, and stop when the verdict is sure: the rule of `vivace compare`.

Looking at the data again and again makes an interval that is right once wrong too often. So the looks are few and
fixed, and the allowed error is divided among them (Bonferroni): all looks together call a recipe slower than it is in
at most FALSE_DIFFERENCE of comparisons. `benchmarks/coverage.py` simulates how often that holds.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from vivace.foundation.stats.intervals import (
    DEFAULT_SPREAD,
    MIN_SAMPLES,
    Interval,
    LogMean,
    Spread,
    log_error,
    mean_over_rounds,
)
from vivace.foundation.stats.verdicts import SAME_WITHIN, Verdict

FIRST_LOOK = 3
DEFAULT_MAX_PAIRS = 32
FALSE_DIFFERENCE = 0.02
"""One-sided error rate over all looks: a recipe is called slower (or faster) without a difference beyond the margin."""
FALSE_SAME = 0.05
"""Error rate over all looks: recipes that differ by the margin are called the same."""
PRIOR = Spread(0.02, 1)
"""Prior with the weight of one observation: the pairs themselves soon show how much processes differ."""
_MOST_DOF = 12
"""Most degrees of freedom: the processes of recipes may differ by different amounts, so each row's own rounds must
count."""


@dataclass(frozen=True)
class Decision:
    """The state of the comparison by the pairs so far.

    Attributes:
        verdict: on the second recipe against the first; same means within 1 %.
        regressed: whether it is slower by more than `fail_if`; None if that is not sure yet.
        ratio: time of the second over that of the first, with the interval that differences are judged by.
        fail_if: the slowdown that is allowed: 0.03 is 3 %; None if none was given.
        sameness: the same ratio with the interval that sameness, or the lack of a regression, is judged by.
    """

    verdict: Verdict
    regressed: bool | None
    ratio: Interval
    num_pairs: int
    fail_if: float | None = None
    sameness: Interval | None = None

    @property
    def shown(self) -> Interval:
        """The ratio with the interval that the answer rests on."""
        is_same = self.verdict is Verdict.SAME if self.fail_if is None else self.regressed is False
        return self.sameness if is_same and self.sameness is not None else self.ratio

    @property
    def is_final(self) -> bool:
        """Whether no more pairs are needed: with `fail_if` that question decides, else the verdict."""
        if self.fail_if is not None:
            return self.regressed is not None
        return self.verdict is not Verdict.UNCLEAR


def looks(max_pairs: int = DEFAULT_MAX_PAIRS) -> list[int]:
    """Return the numbers of pairs at which the data is examined: 3, 4, 6, 8, 12, 16, 24, ..., `max_pairs`."""
    numbers = []
    number = 2
    while number < max_pairs:
        numbers += [n for n in (number, number + number // 2) if FIRST_LOOK <= n < max_pairs]
        number *= 2
    return [*dict.fromkeys(numbers), max_pairs]


def decide(
    first: Sequence[Sequence[float]],
    second: Sequence[Sequence[float]],
    num_looks: int,
    fail_if: float | None = None,
    moves: Sequence[float] = (),
) -> Decision:
    """Return the decision at one of `num_looks` looks.

    Args:
        first, second: seconds by round, in the same order.
        fail_if: the allowed slowdown of the second.
        moves: of the machine within rounds, see `learn_spread`.
    """
    mean = log_speedup(second, first, learn_spread((), PRIOR, moves))
    sure, usual = (mean.interval(1 - 2 * error / num_looks) for error in (FALSE_DIFFERENCE, FALSE_SAME))
    number = min(len(first), len(second))
    if number < 2 or sure.low is None or sure.high is None or usual.low is None or usual.high is None:
        return Decision(Verdict.UNCLEAR, None, Interval(sure.point, None, None), number, fail_if)
    regressed = _regressed(sure, usual, fail_if)
    return Decision(_verdict(sure, usual), regressed, sure, number, fail_if, sameness=usual)


def _verdict(sure: Interval, usual: Interval) -> Verdict:
    least, most = _ends(sure)
    margin = math.log1p(SAME_WITHIN)
    if least > margin:
        return Verdict.SLOWER
    if most < -margin:
        return Verdict.FASTER
    least, most = _ends(usual)
    return Verdict.SAME if -margin <= least and most <= margin else Verdict.UNCLEAR


def _regressed(sure: Interval, usual: Interval, fail_if: float | None) -> bool | None:
    limit = math.log1p(SAME_WITHIN if fail_if is None else fail_if)
    if _ends(sure)[0] > limit:
        return True
    return False if _ends(usual)[1] <= limit else None


def _ends(interval: Interval) -> tuple[float, float]:
    assert interval.low is not None
    assert interval.high is not None
    return math.log(interval.low), math.log(interval.high)


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


_REACH = 8.0  # of the statistic's distribution, in standard deviations
_POINTS = 401
_HALVINGS = 16


def sure_of_each(sure: float, sizes: Sequence[int]) -> float:
    """Return the one-sided confidence of each of several looks at the same growing data, so that all together have the
    confidence `sure`.

    Who looks again until something is decided is wrong more often than the level of each look says. With a constant
    boundary at every look (Pocock 1977, Biometrika 64), the error of all looks together is what was asked for. The
    looks have to be fixed beforehand: they are numbers of observations, and do not depend on what was observed.

    Args:
        sizes: observations at each look, growing.
    """
    return _sure_of_each(sure, tuple(sizes))


@lru_cache(maxsize=64)
def _sure_of_each(sure: float, sizes: tuple[int, ...]) -> float:
    if len(sizes) < 2:
        return sure
    # The density of the sum of the observations is carried from look to look on a grid.
    grid = np.linspace(-_REACH, _REACH, _POINTS) * math.sqrt(sizes[-1])
    width = float(grid[1] - grid[0])
    apart = grid[:, None] - grid[None, :]
    first = _normal(grid, math.sqrt(sizes[0]))
    steps = [
        width * _normal(apart, math.sqrt(size - before))
        for size, before in zip(sizes[1:], sizes, strict=False)
    ]

    def stays_below(boundary: float) -> float:
        """Return the probability that the standardised mean is below the boundary at every look."""
        density = first
        for step, before in zip(steps, sizes, strict=False):
            density = step @ np.where(grid < boundary * math.sqrt(before), density, 0.0)
        return float(density[grid < boundary * math.sqrt(sizes[-1])].sum() * width)

    low, high = NormalDist().inv_cdf(sure), NormalDist().inv_cdf(1 - (1 - sure) / len(sizes))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if stays_below(middle) < sure else (low, middle)
    return NormalDist().cdf(high)


def _normal(x: NDArray[np.float64], sd: float) -> NDArray[np.float64]:
    density: NDArray[np.float64] = np.exp(-0.5 * (x / sd) ** 2) / (sd * math.sqrt(2 * math.pi))
    return density


Levels = list[tuple[float, float]]
"""Levels of one round, in order of time: when its first recipe was measured, and the logarithm of its median seconds
over that of the first time."""


def level_at(points: Levels, time: float) -> float:
    """Return the level at a time: interpolated between two measurements, else that of the nearest."""
    k = bisect([at for at, _ in points], time)
    if k == 0 or k == len(points):
        return points[max(0, k - 1)][1]
    (start, before), (end, after) = points[k - 1], points[k]
    share = 0.5 if end == start else (time - start) / (end - start)
    return before + share * (after - before)
