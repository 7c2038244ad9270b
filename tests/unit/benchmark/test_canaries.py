"""The baseline's canaries: where they stand in a round, and what is stored of them."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.make import make_round, make_trial
from vivace.benchmark.places.trial_jobs import CANARY_CALLS, Job, rounds_of
from vivace.benchmark.schedule import missing_rounds
from vivace.benchmark.worker_requests import RoundRequest
from vivace.foundation.processes.launcher import Ending
from vivace.foundation.spec.record import Outcome, Round
from vivace.foundation.spec.timing import Timing

RECIPES = ("baseline", "tiny_vae", "steps(8)", "steps(9)", "steps(10)", "steps(11)")


class Launched:
    """Stands in for a launcher: notes what was measured, and answers at once."""

    def __init__(self, failing: tuple[str, ...] = (), canaries_fail: bool = False) -> None:
        self.measured: list[str] = []
        self._failing, self._canaries_fail = failing, canaries_fail

    def run(self, request: RoundRequest, limit_s: float, event: Callable[[dict[str, Any]], None]) -> Ending:
        recipe, is_canary = request.trial.recipe.text, request.timing.repeats == CANARY_CALLS
        self.measured.append("canary" if is_canary else recipe)
        fails = recipe in self._failing or (is_canary and self._canaries_fail)
        outcome = Outcome.CRASHED if fails else Outcome.MEASURED
        round_ = make_round(request.round, outcome=outcome, reason="why" if fails else None)
        at = datetime.now(UTC).isoformat()
        return Ending(round_.model_copy(update={"started_at": at}).model_dump(mode="json"))


def measured(
    launched: Launched, order: tuple[int, ...], *, canaries: bool = True
) -> tuple[list[str], dict[int, Round]]:
    """Run one round in that order; return what ran, and what is stored in the end."""
    job = Job(
        trials=tuple(make_trial(recipe) for recipe in RECIPES[: max(order) + 1]),
        rounds=tuple((trial, 0) for trial in order),
        timing=Timing(rounds=2),
        pictures=None,
        drawn=(True,) * (max(order) + 1),
        canaries=canaries,
    )
    stored: dict[int, Round] = {}
    for done in rounds_of(job, launched):
        assert done.is_update is (done.trial in stored)
        stored[done.trial] = done.round
    return launched.measured, stored


@pytest.mark.parametrize(
    ("order", "ran", "num_canaries"),
    [
        ((0, 1), ["baseline", "tiny_vae", "canary"], 1),
        ((1, 0), ["canary", "tiny_vae", "baseline"], 1),
        (
            (0, 3, 1, 2, 4),
            ["baseline", "steps(9)", "tiny_vae", "steps(8)", "canary", "steps(10)", "canary"],
            2,
        ),
        ((0,), ["baseline"], 0),
    ],
)
def test_the_baseline_stands_at_both_ends_of_a_round_and_between_many_recipes(
    order: tuple[int, ...], ran: list[str], num_canaries: int
) -> None:
    names, stored = measured(Launched(), order)
    assert names == ran
    assert [len(stored[trial].canaries) for trial in order] == [num_canaries if t == 0 else 0 for t in order]
    assert all(len(canary.samples_s) == CANARY_CALLS for canary in stored[0].canaries)


def test_without_canaries_nothing_more_is_measured() -> None:
    assert measured(Launched(), (0, 1), canaries=False)[0] == ["baseline", "tiny_vae"]


def test_a_canary_that_fails_is_said() -> None:
    _, stored = measured(Launched(canaries_fail=True), (0, 1))
    assert stored[0].canaries == ()
    assert stored[0].warnings == ("the baseline's canary crashed: why",)


def test_a_recipe_that_fails_last_does_not_keep_the_canary_away() -> None:
    names, stored = measured(Launched(failing=("steps(8)",)), (0, 1, 2))
    assert names == ["baseline", "tiny_vae", "steps(8)", "canary"]
    assert len(stored[0].canaries) == 1


def test_the_order_within_rounds_is_random_with_the_baseline_at_one_end_and_stays_when_resumed() -> None:
    ten = Timing(rounds=10)
    todo = missing_rounds([{}, {}, {}], ten, seed="a")
    assert todo == missing_rounds([{}, {}, {}], ten, seed="a")
    assert todo != missing_rounds([{}, {}, {}], ten, seed="b")
    orders = [tuple(trial for trial, index in todo if index == k) for k in range(10)]
    assert all(sorted(order) == [0, 1, 2] and order[1] != 0 for order in orders)
    assert len(set(orders)) == 4, "both ends, and both orders of the others"
    first = [stored_round(0), {}, {}]
    rest = missing_rounds(first, Timing(rounds=1), goes_on=True, seed="a")
    assert [trial for trial, _ in rest] == [trial for trial in orders[0] if trial]


def stored_round(index: int) -> dict[int, Round]:
    at = datetime.now(UTC).isoformat()
    return {index: make_round(index).model_copy(update={"started_at": at})}
