"""What ends a comparison, and what rounds can tell."""

import math

import numpy as np
import pytest

from vivace.errors import UsageError
from vivace.foundation.stats import (
    LogMean,
    Verdict,
    detectable,
    log_speedup,
    verdict,
)
from vivace.foundation.stats.until import Until


def ratio(gain: float, error: float, dof: float = 20) -> LogMean:
    return LogMean(math.log(gain), error, dof)


@pytest.mark.parametrize(
    ("text", "gain", "error", "answer"),
    [
        ("faster", 1.2, 0.01, Verdict.FASTER),
        ("faster", 1.2, 0.1, None),
        ("faster", 0.8, 0.01, None),
        ("slower", 0.8, 0.01, Verdict.SLOWER),
        ("same 3%", 1.0, 0.005, Verdict.SAME),
        (" Same  3 % ", 1.0, 0.005, Verdict.SAME),
        ("same", 1.0, 0.005, None),
        ("same", 1.0, 0.001, Verdict.SAME),
        ("same 3%", 1.2, 0.005, None),
        ("faster|same 3%", 1.0, 0.005, Verdict.SAME),
        ("faster | slower | same 3%", 0.8, 0.01, Verdict.SLOWER),
    ],
)
def test_an_answer_is_given_when_it_is_sure(
    text: str, gain: float, error: float, answer: Verdict | None
) -> None:
    assert Until.parse(text).answer(ratio(gain, error), 4, 9) is answer


def test_the_opposite_ends_it_too() -> None:
    assert Until.parse("same 3%").is_missed(ratio(1.2, 0.01), 9)
    assert not Until.parse("faster|same 3%").is_missed(ratio(1.2, 0.01), 9)
    assert Until.parse("faster").is_missed(ratio(0.8, 0.01), 9)
    assert not Until.parse("faster").is_missed(ratio(1.0, 0.01), 9)


@pytest.mark.parametrize("text", ["", "sure", "same 0%", "same 90%", "faster,same", "same 3", "faster|"])
def test_anything_else_is_refused_in_words(text: str) -> None:
    with pytest.raises(UsageError, match="give faster, slower or same N%"):
        Until.parse(text)


def test_what_rounds_are_said_to_tell_they_tell() -> None:
    """Processes differ by 2 %, as assumed: four in five gains of that size are called faster."""
    random = np.random.default_rng(0)
    for rounds in (2, 4):
        gain, detected, repeats = 1 + detectable(rounds), 0, 300
        for _ in range(repeats):
            levels = np.exp(0.02 * random.standard_normal((2, rounds)))
            levels[1] /= gain
            times = [[np.full(10, level) for level in of] for of in levels]
            detected += verdict(log_speedup(*times), rounds) is Verdict.FASTER
        assert 0.7 < detected / repeats < 0.97
