"""The end of a search's time: what is under way is stopped, and the answer is made of what there is."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests import slow_worker
from vivace.benchmark.progress import Deadline
from vivace.benchmark.store import Store
from vivace.foundation.processes.launcher import Launcher
from vivace.foundation.spec.record import Outcome
from vivace.tuning import tune
from vivace.tuning.answer import Tuned

MINUTES = 0.06
LONGEST_S = 60 * MINUTES + 3.0
"""The limit, and what stopping a worker and writing the answer may take on a busy machine."""


def tuned_in(store: Path, final_round_s: float, **budget: Any) -> tuple[Tuned, float]:
    """Return the answer of a search on a host whose final is slower than expected, and the seconds that it took."""
    variables = {"VIVACE_FINAL_ROUND_S": str(final_round_s)}
    with Launcher(slow_worker.COMMAND, tries_gpu=False, variables=variables) as launcher:
        launcher.run(
            slow_worker.EnvironmentRequest(device="cpu"), 60
        )  # its imports are not part of the search
        began = time.monotonic()
        answer = tune("synthetic:sd15", store=store, device="cpu", launcher=launcher, **budget)
        return answer, time.monotonic() - began


def test_a_final_of_one_round_proves_nothing_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """A round of the final takes 1.9 s of 7.2, so that one of each recipe fits and two do not."""
    answer, seconds = tuned_in(tmp_path, 1.9, minutes=2 * MINUTES, trials=4)
    assert seconds < LONGEST_S + 60 * MINUTES
    text = " ".join(str(answer).split())
    assert answer.pick is None, "a speed-up of one round has no interval"
    assert {len(row.record.rounds) for row in answer.rows} == {1}
    assert "the time ended" in text
    assert "the best so far, not proved, is" in text
    assert "may still pass: --minutes" in text
    assert outcomes(tmp_path) == {Outcome.MEASURED}, "nothing of a stopped round is stored"

    again, _ = tuned_in(tmp_path, 0.0, trials=4)
    assert again.row is not None
    assert len(again.row.record.rounds) == 2
    assert "time ended" not in str(again)


@pytest.mark.long
def test_where_no_round_of_the_final_fits_the_answer_says_so(tmp_path: Path) -> None:
    answer, seconds = tuned_in(tmp_path, 60.0, minutes=MINUTES)
    assert seconds < LONGEST_S
    text = " ".join(str(answer).split())
    assert answer.pick is None
    assert "the time ended before the final had measured" in text
    assert "the best so far, not proved, is" in text
    assert outcomes(tmp_path) == {Outcome.MEASURED}


def outcomes(folder: Path) -> set[Outcome]:
    with Store.read_only(folder) as store:
        return {r.outcome for run in store.runs() for key in run.keys for r in store.rounds(key).values()}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def begun(
    deadline: Deadline, clock: Clock, rounds: list[tuple[int, int]], round_s: float
) -> list[tuple[int, int]]:
    """Return the rounds that begin where each takes so long."""
    keys = []
    for position, (trial, index) in enumerate(rounds):
        due = [other for other, same in rounds[position:] if same == index]
        if deadline.allows(trial, index, due):
            deadline.begin()
            clock.now += round_s
            deadline.end(trial, index)
            keys.append((trial, index))
    return keys


TWO_ROUNDS = [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]


@pytest.mark.parametrize(
    ("until", "expected"),
    [
        (100, TWO_ROUNDS),
        (55, [(0, 0), (1, 0), (2, 0), (1, 1), (0, 1)]),  # the second recipe's second round is left out
        (45, [(0, 0), (1, 0), (2, 0)]),  # a recipe's round without the baseline's would be worth nothing
        (25, [(0, 0), (1, 0)]),
        (5, [(0, 0)]),
    ],
)
def test_rounds_that_do_not_fit_are_not_begun(until: float, expected: list[tuple[int, int]]) -> None:
    clock = Clock()
    deadline = Deadline(until, until, [5.0] * 3, [5.0] * 3, clock)  # they take twice as long as estimated
    assert begun(deadline, clock, TWO_ROUNDS, 10.0) == expected


def test_where_the_baseline_comes_last_it_keeps_its_time() -> None:
    clock = Clock()
    deadline = Deadline(25, 25, [10.0] * 3, [10.0] * 3, clock)
    assert begun(deadline, clock, [(2, 1), (1, 1), (0, 1)], 10.0) == [(1, 1), (0, 1)]
