"""The speed-up of one row over another when the CPU's speed changed between them."""

from __future__ import annotations

import pytest

from tests.make import make_record, make_round
from vivace.evidence.studies.judging import SpeedUp, _with_drift, speed_up
from vivace.foundation.spec.record import Record
from vivace.foundation.stats import Verdict
from vivace.report.rows import Row, rows_of

HALF, WHOLE = (0.5, 0.5, 0.5, 0.5), (1.0, 1.0, 1.0, 1.0)


def row(recipe: str, python_ms: float, busy_s: float | None, times: tuple[float, ...]) -> Row:
    """A row whose baseline ran beside a Python loop of 4 ms."""

    def record(text: str, ms: float, seconds: tuple[float, ...]) -> Record:
        update = {"conditions": {"python_ms": ms}, "gpu_busy_s": busy_s}
        return make_record(text, *(make_round(i, seconds).model_copy(update=update) for i in range(2)))

    return rows_of([record("baseline", 4.0, WHOLE), record(recipe, python_ms, times)])[1]


def gain(before_ms: float, after_ms: float, busy_s: float | None) -> SpeedUp:
    gained = speed_up(row("bf16", before_ms, busy_s, WHOLE), row("tiny_vae", after_ms, busy_s, HALF))
    assert gained is not None
    return gained


def test_a_busy_gpu_bounds_what_the_cpu_can_have_done() -> None:
    """0.05 s of waiting on a CPU of twice the speed would be 0.1 s on the other row's: 0.55 instead of 0.5 s."""
    same, halved = gain(4.0, 4.0, 0.45), gain(4.0, 2.0, 0.45)
    assert (same.verdict, same.doubt) == (Verdict.FASTER, "")
    assert halved.verdict is Verdict.FASTER
    assert not halved.is_disturbed
    assert same.ratio.low is not None
    assert halved.ratio.low == pytest.approx(same.ratio.low * 0.5 / 0.55)
    assert halved.ratio.high == same.ratio.high
    assert "changed by 2.0 times" in halved.doubt
    assert _with_drift(halved) == halved.ratio, "there were two rounds"


@pytest.mark.parametrize("busy_s", [0.3, None])
def test_nothing_is_told_where_the_gpu_waited_long_or_nobody_knows_how_long(busy_s: float | None) -> None:
    """Launches do not scale exactly as the Python loop does that tells the CPU's speed."""
    gained = gain(4.0, 2.0, busy_s)
    assert gained.is_disturbed
    assert gained.verdict is Verdict.UNCLEAR
    assert gained.doubt == "the CPU's speed changed by 2.0 times between the two"
    assert not gain(2.0, 2.0, busy_s).is_disturbed, "both beside the same CPU"


@pytest.mark.parametrize("busy_s", [0.3, None])
def test_a_difference_that_no_change_of_the_cpu_explains_is_told(busy_s: float | None) -> None:
    """The CPU was 1.3 times as slow beside the first row, so of twice the speed at least 1.18 times is the recipe's."""
    gained = gain(4.0 * 1.3, 4.0, busy_s)
    assert gained.verdict is Verdict.FASTER
    assert not gained.is_disturbed
    same = gain(4.0, 4.0, busy_s).ratio.low
    assert same is not None
    assert gained.ratio.low == pytest.approx(same / 1.3**2)
    assert "changed by 1.3 times between the two, which the interval allows for" in gained.doubt
    slower = speed_up(row("bf16", 4.0, busy_s, HALF), row("tiny_vae", 4.0 * 1.3, busy_s, WHOLE))
    assert slower is not None
    assert slower.verdict is Verdict.SLOWER
