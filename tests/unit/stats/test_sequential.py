"""The stopping rule of `vivace compare`: few looks, a verdict when it is sure, honest when it is not."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from vivace.foundation.stats.sequential import FALSE_DIFFERENCE, decide, looks
from vivace.foundation.stats.verdicts import Verdict

Pairs = tuple[list[list[float]], list[list[float]]]


def pairs_of(logs: Sequence[float]) -> Pairs:
    """Return the seconds of pairs whose ratios have these logarithms."""
    return [[1.0] * 3 for _ in logs], [[math.exp(log)] * 3 for log in logs]


def pairs(ratio: float, number: int, sd: float = 0.002) -> Pairs:
    """Return pairs whose mean is exactly that ratio of the second's time to the first's."""
    around = np.resize([sd, -sd], number)
    return pairs_of([math.log(ratio) + float(x) for x in around - around.mean()])


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(1.2, Verdict.SLOWER), (1 / 1.2, Verdict.FASTER), (1.0, Verdict.SAME)]
)
def test_sixteen_quiet_pairs_have_a_verdict(ratio: float, verdict: Verdict) -> None:
    decision = decide(*pairs(ratio, 16), num_looks=9)
    assert (decision.verdict, decision.is_final, decision.num_pairs) == (verdict, True, 16)
    assert decision.ratio.point == pytest.approx(ratio)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_few_pairs_are_not_the_same(number: int) -> None:
    assert not decide(*pairs(1.0, number), num_looks=9).is_final


def test_same_needs_the_whole_interval_within_one_percent() -> None:
    assert decide(*pairs(1.005, 16), num_looks=9).verdict is Verdict.UNCLEAR
    assert decide(*pairs(1.005, 64), num_looks=9).verdict is Verdict.SAME


def test_an_allowed_slowdown_is_another_question() -> None:
    by_two = decide(*pairs(1.02, 16), num_looks=9, fail_if=0.03)
    assert (by_two.regressed, by_two.is_final) == (False, True)
    by_three = decide(*pairs(1.03, 16), num_looks=9, fail_if=0.03)
    assert (by_three.regressed, by_three.is_final) == (None, False)
    assert by_three.verdict is Verdict.SLOWER, "it is slower, only not surely by more than is allowed"
    assert decide(*pairs(1.05, 16), num_looks=9, fail_if=0.03).regressed is True


def test_a_machine_that_moves_within_pairs_makes_nothing_sure() -> None:
    """Three pairs that agree by chance: their order was, and the machine's movement is the difference."""
    slower = pairs(1.12, 3, 0.0)
    assert decide(*slower, num_looks=9).verdict is Verdict.SLOWER
    assert decide(*slower, num_looks=9, moves=[0.0, 0.001, 0.0]).verdict is Verdict.SLOWER
    assert decide(*slower, num_looks=9, moves=[0.1, -0.1, 0.12]).verdict is Verdict.UNCLEAR


@pytest.mark.parametrize("process_sd", [0.005, 0.03])
@pytest.mark.quick("0.03")
def test_a_recipe_is_rarely_slower_than_itself(process_sd: float) -> None:
    """All looks together; the full simulation is benchmarks/command_coverage.py."""
    generator = np.random.default_rng(0)
    wrong = 0
    repeats = 500
    for _ in range(repeats):
        drawn = generator.normal(0, math.sqrt(2) * process_sd, 32).tolist()
        wrong += any(decide(*pairs_of(drawn[:n]), 9).verdict is Verdict.SLOWER for n in looks(32))
    assert wrong / repeats <= FALSE_DIFFERENCE


@pytest.mark.parametrize("fail_if", [None, 0.03])
@pytest.mark.parametrize("ratio", [0.9, 0.99, 1.0, 1.005, 1.02, 1.03, 1.05])
@pytest.mark.parametrize("sd", [0.002, 0.004, 0.08])
def test_the_interval_that_is_shown_is_the_one_that_decides(
    ratio: float, sd: float, fail_if: float | None
) -> None:
    """Nobody should read "not slower by more than 3 %" beside an interval that ends at 5 %."""
    decision = decide(*pairs(ratio, 16 if sd < 0.05 else 6, sd), num_looks=9, fail_if=fail_if)
    low, high, margin = decision.shown.low, decision.shown.high, 0.01 if fail_if is None else fail_if
    assert low is not None
    assert high is not None
    if fail_if is not None:
        assert decision.regressed is None or (low > 1 + margin if decision.regressed else high <= 1 + margin)
    elif decision.verdict is Verdict.SAME:
        assert 1 / (1 + margin) <= low <= high <= 1 + margin
    elif decision.verdict is not Verdict.UNCLEAR:
        assert low > 1 + margin or high < 1 / (1 + margin)
