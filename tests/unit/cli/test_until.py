"""`vivace bench --until`: how it goes on, and when it stops."""

from pathlib import Path

import pytest

from tests.make import make_record, make_round
from vivace.benchmark.run import Compared, Run
from vivace.benchmark.studies import go_on
from vivace.foundation.spec.study import Study
from vivace.foundation.stats.until import Until
from vivace.report.rows import NO_QUALITY


def run_of(rounds: int, gain: float) -> Run:
    times = (1.0, 1.001, 0.999, 1.0, 1.002, 0.998)
    baseline = make_record("baseline", *(make_round(k, times) for k in range(rounds)))
    faster = make_record("tiny_vae", *(make_round(k, tuple(t / gain for t in times)) for k in range(rounds)))
    study = Study.of("tiny-sd", ["baseline", "tiny_vae"])
    return Run(study, Path("store"), (Compared((baseline, faster), NO_QUALITY),))


def rounds_until(until: str, gain: float, minutes: float = 60.0) -> tuple[list[int], tuple[str, ...]]:
    """Return the numbers of rounds that were run, and the answers."""
    numbers: list[int] = []

    def run_rounds(number: int) -> Run:
        numbers.append(number)
        return run_of(number, gain)

    run = go_on(run_rounds, Until.parse(until), 2, minutes)
    return numbers, run.answers


def test_it_goes_on_until_it_is_told() -> None:
    assert rounds_until("faster", 1.5) == ([2], ("tiny_vae: faster, after 2 rounds",))
    numbers, answers = rounds_until("faster|same 3%", 1.0)
    assert numbers == [2, 3, 4, 6]
    assert answers == ("tiny_vae: same within 3 %, after 6 rounds",)


def test_it_stops_where_the_opposite_is_sure() -> None:
    assert rounds_until("same 3%", 1.5) == ([2], ("tiny_vae: surely not, after 2 rounds (1.5x)",))


def test_it_stops_at_32_rounds_or_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, answers = rounds_until("faster", 1.0)
    assert numbers[-1] == 32
    assert answers == ("tiny_vae: undecided after 32 rounds",)
    clock = iter(range(0, 100_000, 100))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    numbers, answers = rounds_until("faster", 1.0, minutes=2.0)
    assert numbers == [2]
    assert answers[-1] == "stopped after 2 rounds: 3 would take longer than --max-minutes 2"
