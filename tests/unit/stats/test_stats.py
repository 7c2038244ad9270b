import math

import numpy as np
import pytest

from vivace.foundation.stats import (
    DEFAULT_SPREAD,
    LogMean,
    Verdict,
    enough_samples,
    is_steady,
    learn_spread,
    log_speedup,
    median_interval,
    speedup,
    verdict,
)


@pytest.mark.parametrize("number", [4, 6, 30])
def test_the_interval_of_one_round_covers_the_true_median_about_95_percent_of_the_time(number: int) -> None:
    generator = np.random.default_rng(1)
    hits = 0
    trials = 400
    for _ in range(trials):
        interval = median_interval([list(generator.lognormal(mean=0.0, sigma=0.02, size=number))])
        assert interval.low is not None
        assert interval.high is not None
        hits += interval.low <= 1.0 <= interval.high
    assert 0.91 <= hits / trials <= 0.99


def test_rounds_that_disagree_widen_the_interval() -> None:
    agreeing = median_interval([[1.0, 1.01, 0.99], [1.0, 1.01, 0.99]])
    disagreeing = median_interval([[1.0, 1.01, 0.99], [1.2, 1.21, 1.19]])
    assert agreeing.half_width is not None
    assert disagreeing.half_width is not None
    assert disagreeing.half_width > 2 * agreeing.half_width


def test_two_rounds_that_agree_by_chance_are_not_believed() -> None:
    """Their own spread would be nothing."""
    interval = median_interval([[1.0, 1.01, 0.99], [1.0, 1.01, 0.99]])
    assert interval.half_width is not None
    assert interval.half_width > 0.03


def test_speedup_is_paired_by_round() -> None:
    # The machine was twice as slow in the second round, for both: the ratio does not care.
    baseline = [[2.0, 2.02, 1.98, 2.01], [4.0, 4.04, 3.96, 4.02]]
    other = [[1.0, 1.01, 0.99, 1.0], [2.0, 2.02, 1.98, 2.0]]
    ratio = speedup(baseline, other)
    assert ratio.point == pytest.approx(2.0, rel=0.02)
    assert ratio.low is not None
    assert ratio.low > 1.8
    assert verdict(log_speedup(baseline, other), 2) is Verdict.FASTER


def test_a_speedup_that_one_round_contradicts_is_unclear() -> None:
    baseline = [[1.0, 1.01, 0.99], [1.0, 1.01, 0.99]]
    other = [[0.9, 0.91, 0.89], [1.2, 1.21, 1.19]]
    assert verdict(log_speedup(baseline, other), 2) is Verdict.UNCLEAR


def ratio_of(point: float, half_width: float | None) -> LogMean:
    """A ratio whose 95 % interval is `half_width` on either side, in logarithms, and whose 99 % interval is wider."""
    return LogMean(math.log(point), None if half_width is None else half_width / 1.96, math.inf)


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (ratio_of(1.5, 0.1), Verdict.FASTER),
        (ratio_of(0.7, 0.1), Verdict.SLOWER),
        (ratio_of(1.0, 0.005), Verdict.SAME),
        (ratio_of(1.02, 0.04), Verdict.UNCLEAR),
        (ratio_of(1.05, 0.045), Verdict.UNCLEAR),  # the 95 % interval lies above 1
        (ratio_of(1.015, 0.002), Verdict.FASTER),
        (ratio_of(2.0, None), Verdict.UNCLEAR),
    ],
)
def test_verdicts(ratio: LogMean, expected: Verdict) -> None:
    assert verdict(ratio, 2) is expected


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (ratio_of(1.05, 0.01), Verdict.UNCLEAR),
        (ratio_of(0.95, 0.01), Verdict.UNCLEAR),
        (ratio_of(1.0, 0.001), Verdict.UNCLEAR),
        (ratio_of(1.3, 0.05), Verdict.FASTER),
        (ratio_of(0.5, 0.05), Verdict.SLOWER),
    ],
)
def test_one_round_cannot_tell_small_differences_from_drift(ratio: LogMean, expected: Verdict) -> None:
    assert verdict(ratio, 1) is expected


def rounds_of(generator: np.random.Generator, sd: float, number: int = 2) -> dict[int, list[float]]:
    """Rounds of six calls of 1 s ±0.5 %, in processes that differ by `sd`."""
    levels = np.exp(sd * generator.standard_normal(number))
    return {k: list(level * (1 + 0.005 * generator.standard_normal(6))) for k, level in enumerate(levels)}


def test_a_recipe_is_seldom_faster_than_itself_and_a_gain_is_found() -> None:
    generator = np.random.default_rng(0)
    wrong = num_found = 0
    for _ in range(300):
        baseline, other = (list(rounds_of(generator, 0.01).values()) for _ in range(2))
        wrong += verdict(log_speedup(baseline, other), 2) in (Verdict.FASTER, Verdict.SLOWER)
        num_found += (
            verdict(log_speedup(baseline, [[s / 1.15 for s in r] for r in other]), 2) is Verdict.FASTER
        )
    assert wrong <= 3
    assert num_found >= 285


def test_the_spread_between_processes_is_learnt_from_trials_side_by_side() -> None:
    generator = np.random.default_rng(0)
    for sd in (0.0, 0.05):
        machine = np.exp(0.2 * generator.standard_normal(4))
        trials = [
            {k: [s * machine[k] * 2**n for s in times] for k, times in rounds_of(generator, sd, 4).items()}
            for n in range(6)
        ]
        spread = learn_spread(trials)
        assert spread.dof == DEFAULT_SPREAD.dof + 12
        assert spread.sd == pytest.approx(math.hypot(0.01, sd * math.sqrt(0.75)), rel=0.3)
    assert learn_spread(trials[:1]) == learn_spread([]) == DEFAULT_SPREAD
    assert learn_spread([{0: [1.0] * 3}, {0: [2.0] * 3}]) == DEFAULT_SPREAD, "one round tells nothing"
    apart = [trials[0], {0: [1.0] * 3}]
    assert learn_spread(apart) == DEFAULT_SPREAD, "a trial that lacks rounds is not compared"


def test_steady_needs_times_that_stay() -> None:
    assert is_steady([1.0, 1.0, 1.0]) is None, "too few to tell"
    assert is_steady([1.0, 1.0, 1.0, 1.0])
    assert not is_steady([2.0, 1.6, 1.3, 1.1])
    assert not is_steady([1.0, 0.98, 0.96, 0.94]), "still falling by 2 % a call"
    assert is_steady([1.0, 1.04, 1.03, 0.99]), "noise"


def test_stopping_asks_for_more_samples_of_short_calls() -> None:
    assert not enough_samples([2.0] * 5)
    assert enough_samples([2.0] * 6)
    assert not enough_samples([0.1] * 9)
    assert enough_samples([0.1] * 10)
    assert not enough_samples([1.0, 2.0, 1.5, 1.8, 1.2, 1.4])
