import numpy as np
import pytest

from vivace.stats import Interval, Verdict, enough_samples, is_steady, median_interval, speedup, verdict


def test_median_interval_covers_the_true_median_about_95_percent_of_the_time() -> None:
    generator = np.random.default_rng(1)
    hits = 0
    trials = 200
    for _ in range(trials):
        samples = generator.lognormal(mean=0.0, sigma=0.2, size=30)
        found = median_interval([list(samples)])
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 1.0 <= found.high
    assert 0.88 <= hits / trials <= 1.0


def test_too_few_samples_have_no_interval() -> None:
    assert median_interval([[1.0, 2.0]]) == Interval(1.5, None, None)
    with pytest.raises(ValueError, match="no samples"):
        median_interval([[]])


def test_intervals_are_reproducible() -> None:
    samples = [[1.0, 1.1, 0.9, 1.05, 1.2]]
    assert median_interval(samples) == median_interval(samples)


def test_rounds_that_disagree_widen_the_interval() -> None:
    agreeing = median_interval([[1.0, 1.01, 0.99], [1.0, 1.01, 0.99]])
    disagreeing = median_interval([[1.0, 1.01, 0.99], [1.2, 1.21, 1.19]])
    assert agreeing.half_width is not None
    assert disagreeing.half_width is not None
    assert disagreeing.half_width > 3 * agreeing.half_width


def test_speedup_is_paired_by_round() -> None:
    # The machine was twice as slow in the second round, for both: the ratio does not care.
    baseline = [[2.0, 2.02, 1.98, 2.01], [4.0, 4.04, 3.96, 4.02]]
    other = [[1.0, 1.01, 0.99, 1.0], [2.0, 2.02, 1.98, 2.0]]
    ratio = speedup(baseline, other)
    assert ratio.point == pytest.approx(2.0, rel=0.02)
    assert ratio.low is not None
    assert ratio.low > 1.9
    assert verdict(ratio, 2) is Verdict.FASTER


def test_a_speedup_that_one_round_contradicts_is_unclear() -> None:
    baseline = [[1.0, 1.01, 0.99], [1.0, 1.01, 0.99]]
    other = [[0.9, 0.91, 0.89], [1.2, 1.21, 1.19]]
    assert verdict(speedup(baseline, other), 2) is Verdict.UNCLEAR


def test_speedup_needs_a_shared_round() -> None:
    with pytest.raises(ValueError, match="no round"):
        speedup([[1.0], []], [[], [1.0]])


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (Interval(1.5, 1.4, 1.6), Verdict.FASTER),
        (Interval(0.7, 0.6, 0.8), Verdict.SLOWER),
        (Interval(1.0, 0.995, 1.005), Verdict.SAME),
        (Interval(1.02, 0.98, 1.06), Verdict.UNCLEAR),
        (Interval(2.0, None, None), Verdict.UNCLEAR),
    ],
)
def test_verdicts(interval: Interval, expected: Verdict) -> None:
    assert verdict(interval, 2) is expected


def test_steady_needs_times_that_stay() -> None:
    assert not is_steady([1.0, 1.0, 1.0])
    assert is_steady([1.0, 1.0, 1.0, 1.0])
    assert not is_steady([2.0, 1.6, 1.3, 1.1])


def test_stopping_asks_for_more_samples_of_short_calls() -> None:
    assert not enough_samples([2.0] * 4)
    assert enough_samples([2.0] * 5)
    assert not enough_samples([0.1] * 9)
    assert enough_samples([0.1] * 10)
    assert not enough_samples([1.0, 2.0, 1.5, 1.8, 1.2])


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (Interval(1.05, 1.04, 1.06), Verdict.UNCLEAR),
        (Interval(0.95, 0.92, 0.97), Verdict.UNCLEAR),
        (Interval(1.0, 0.999, 1.001), Verdict.UNCLEAR),
        (Interval(1.3, 1.2, 1.4), Verdict.FASTER),
        (Interval(0.5, 0.4, 0.6), Verdict.SLOWER),
    ],
)
def test_one_round_cannot_tell_small_differences_from_drift(interval: Interval, expected: Verdict) -> None:
    assert verdict(interval, 1) is expected
