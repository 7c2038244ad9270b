"""Canaries: where they stand in a round, and what is stored of them."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.make import make_round, make_trial
from vivace.benchmark.places.trial_jobs import CANARY_CALLS, Job, rounds_of
from vivace.benchmark.progress import Deadline
from vivace.benchmark.rounds.worker_requests import RoundRequest
from vivace.foundation.processes.launcher import Ending
from vivace.foundation.spec.record import Outcome, Round
from vivace.foundation.spec.timing import Timing

RECIPES = ("baseline", "tiny_vae", "steps(8)", "steps(9)", "steps(10)", "steps(11)")


class Launched:
    """Stands in for a launcher: notes what was measured, and answers at once."""

    def __init__(self, failing: tuple[str, ...] = (), canaries_fail: bool = False) -> None:
        self.measured: list[str] = []
        self.now = 0.0
        self._failing, self._canaries_fail = failing, canaries_fail

    def run(self, request: RoundRequest, limit_s: float, event: Callable[[dict[str, Any]], None]) -> Ending:
        recipe, is_canary = request.trial.recipe.text, request.timing.repeats == CANARY_CALLS
        self.measured.append(f"canary of {recipe}" if is_canary else recipe)
        self.now += 1.0
        fails = recipe in self._failing or (is_canary and self._canaries_fail)
        outcome = Outcome.CRASHED if fails else Outcome.MEASURED
        round_ = make_round(request.round, outcome=outcome, reason="why" if fails else None)
        at = datetime.now(UTC).isoformat()
        return Ending(round_.model_copy(update={"started_at": at}).model_dump(mode="json"))


def measured(
    launched: Launched, order: tuple[int, ...], *, canaries: bool = True, until: float | None = None
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
    ones = [1.0] * len(job.trials)
    deadline = None if until is None else Deadline(until, until, ones, ones, clock=lambda: launched.now)
    for done in rounds_of(job, launched, deadline=deadline):
        assert done.is_update is (done.trial in stored)
        stored[done.trial] = done.round
    return launched.measured, stored


@pytest.mark.parametrize(
    ("order", "ran"),
    [
        ((0, 1), ["baseline", "tiny_vae", "canary of baseline"]),
        ((1, 0), ["tiny_vae", "baseline", "canary of tiny_vae"]),
        (
            (3, 0, 1, 2, 4),
            [
                "steps(9)",
                "baseline",
                "tiny_vae",
                "steps(8)",
                "canary of steps(9)",
                "steps(10)",
                "canary of steps(9)",
            ],
        ),
        ((0,), ["baseline"]),
    ],
)
def test_the_first_of_a_round_is_measured_again_at_its_end_and_between_many(
    order: tuple[int, ...], ran: list[str]
) -> None:
    names, stored = measured(Launched(), order)
    assert names == ran
    number = sum("canary" in name for name in ran)
    assert [len(stored[trial].canaries) for trial in order] == [number, *[0] * (len(order) - 1)]
    assert all(len(canary.samples_s) == CANARY_CALLS for canary in stored[order[0]].canaries)


def test_where_time_is_short_canaries_are_left_out_before_rounds_are() -> None:
    names, stored = measured(Launched(), (0, 1), until=2.5)
    assert names == ["baseline", "tiny_vae"]
    assert "machine's speed" in stored[0].warnings[0], "and said"
    assert measured(Launched(), (0, 1), until=4.0)[0] == ["baseline", "tiny_vae", "canary of baseline"]


def test_a_canary_that_fails_is_said() -> None:
    _, stored = measured(Launched(canaries_fail=True), (0, 1))
    assert stored[0].canaries == ()
    assert stored[0].warnings == ("the recipe's canary crashed: why",)
