"""Which rounds are run, and which stored ones are compared."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.make import make_record, make_round
from vivace.benchmark.rounds.schedule import comparable, missing_rounds
from vivace.foundation.spec.record import Outcome, Record, Round
from vivace.foundation.spec.timing import Timing

TWO = Timing(rounds=2)
NOW = datetime.now(UTC)


def at(index: int, minutes_ago: float = 0.0, outcome: Outcome = Outcome.MEASURED, **fields: Any) -> Round:
    started = (NOW - timedelta(minutes=minutes_ago)).isoformat(timespec="seconds")
    return make_round(index, outcome=outcome, reason="why", **fields).model_copy(
        update={"started_at": started}
    )


def stored(*rounds: Round) -> dict[int, Round]:
    return {r.index: r for r in rounds}


def todo(*arguments: Any, **options: Any) -> list[tuple[int, int]]:
    """Return the missing rounds in the trials' order, whatever their random order is."""
    missing = missing_rounds(*arguments, **options)
    assert [index for _, index in missing] == sorted(index for _, index in missing), "round by round"
    return sorted(missing, key=lambda round_: (round_[1], round_[0]))


def test_a_new_comparison_is_interleaved() -> None:
    assert todo([{}, {}, {}], TWO) == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]


def test_the_order_within_rounds_is_random_and_stays_when_resumed() -> None:
    ten = Timing(rounds=10)
    first = missing_rounds([{}, {}, {}], ten, seed="a")
    assert first == missing_rounds([{}, {}, {}], ten, seed="a") != missing_rounds([{}, {}, {}], ten, seed="b")
    orders = [tuple(trial for trial, index in first if index == k) for k in range(10)]
    assert {order[0] for order in orders} == {0, 1, 2}, "no trial has a place of its own"
    for order, other in zip(orders[::2], orders[1::2], strict=True):
        assert all(a != b for a, b in zip(order, other, strict=True)), (
            "each has another place in the next round"
        )
    rest = missing_rounds([stored(at(0)), {}, {}], Timing(rounds=1), goes_on=True, seed="a")
    assert [trial for trial, _ in rest] == [trial for trial in orders[0] if trial]


def test_nothing_is_measured_twice() -> None:
    both = stored(at(0, 900), at(1, 900))
    assert todo([both, both], TWO) == []
    assert todo([both, both], TWO, rerun=True) == [(0, 2), (1, 2), (0, 3), (1, 3)]


def test_the_baseline_is_measured_again_beside_a_new_recipe() -> None:
    both = stored(at(0, 5), at(1, 5))
    assert todo([both, both, {}], TWO) == [(0, 2), (2, 2), (0, 3), (2, 3)]


def test_an_interrupted_run_completes_its_rounds() -> None:
    first = [stored(at(0, 5)), stored(at(0, 5)), {}]
    assert todo(first, TWO, goes_on=True) == [(2, 0), (0, 1), (1, 1), (2, 1)]
    last = [stored(at(0, 5)), stored(at(0, 5), at(1, 4))]
    assert todo(last, TWO, goes_on=True) == [(0, 1)], "the second round began with the other recipe"
    old = [stored(at(0, 90)), {}]
    assert todo(old, TWO, goes_on=True) == [(0, 1), (1, 1), (0, 2), (1, 2)], "too long ago"


def test_rounds_of_other_comparisons_are_no_pairs() -> None:
    """Each was measured with a third recipe; the last run of both was interrupted after one round."""
    baseline, other = stored(at(7, 30), at(8, 29)), stored(at(0, 50), at(1, 49), at(9, 2))
    single = Timing(rounds=1)
    assert todo([baseline, other], single, goes_on=True) == [(0, 9)]
    assert todo([baseline, other], single) == [(0, 10), (1, 10)]
    assert todo([stored(*baseline.values(), at(9)), other], single, goes_on=True) == []
    assert todo([stored(), other], single, goes_on=True) == [(0, 9)]


def test_a_failure_is_kept_and_a_crash_tried_again() -> None:
    baseline = stored(at(0, 5), at(1, 5))
    refused = stored(at(0, 5, Outcome.UNSUPPORTED))
    assert todo([baseline, refused], TWO) == []
    crashed = stored(at(0, 5), at(1, 4, Outcome.CRASHED))
    assert todo([baseline, crashed], TWO) == [(0, 2), (1, 2)]
    assert todo([baseline, crashed], TWO, goes_on=True) == [(1, 1)]


def test_rounds_with_too_few_samples_are_measured_again() -> None:
    both = stored(at(0, 5), at(1, 5))
    timing = Timing(rounds=2, repeats=4)
    assert [index for _, index in todo([both, both], timing)] == [2, 2, 3, 3]


def record(*rounds: Round) -> Record:
    return make_record("baseline").model_copy(update={"rounds": rounds})


def indices(records: list[Record]) -> list[list[int]]:
    return [[r.index for r in attempt.rounds] for attempt in records]


def test_only_rounds_of_one_sitting_are_compared() -> None:
    baseline = record(at(0, 90), at(1, 90), at(2), at(3))
    old, new = record(at(0, 90), at(1, 90)), record(at(2), at(3))
    assert indices(comparable([baseline, new], 2)) == [[2, 3], [2, 3]]
    assert indices(comparable([baseline, old, new], 2)) == [[0, 1, 2, 3], [0, 1], [2, 3]]
    assert indices(comparable([baseline], 2)) == [[2, 3]]
    assert indices(comparable([baseline, None, new])) == [[2, 3], [2, 3]]


def test_images_stay_though_their_round_is_left_out() -> None:
    baseline = record(at(0, 90), at(1).model_copy(update={"pictures": ()}))
    records = comparable([baseline, record(at(1))])
    assert indices(records) == [[1], [1]]
    assert records[0].rounds[0].pictures == baseline.rounds[0].pictures


@pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.OUT_OF_MEMORY])
def test_the_latest_attempt_is_the_outcome(outcome: Outcome) -> None:
    baseline = record(at(0, 5), at(1, 5), at(2, 1))
    failed = record(at(0, 5), at(1, 4, outcome))
    assert comparable([baseline, failed])[1].outcome is outcome
    tried = record(at(0, 5), at(1, 4, outcome), at(2, 1))
    records = comparable([baseline, tried])
    assert records[1].outcome is Outcome.MEASURED
    assert indices(records) == [[0, 2], [0, 2]]
