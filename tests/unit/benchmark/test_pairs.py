"""Pairs of rounds until the verdict is sure: when it stops, what it keeps, what the exit code says."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import vivace
from tests.typed import run_vivace
from vivace.answers.data import junit_of
from vivace.benchmark import pairs
from vivace.benchmark.pairs import Paired, PairSettings, answer_of, measure_pairs
from vivace.benchmark.store import Store
from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.record import Outcome, Record, Round, Sample
from vivace.foundation.stats.sequential import Decision
from vivace.foundation.stats.verdicts import Verdict

SHORT = ("--steps", "8", "--warmup", "2", "--repeats", "3", "--device", "cpu", "--max-pairs", "3")


@pytest.fixture(scope="module")
def trials_and_environment(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Environment]:
    """Return two trials of a real run of one pair, to build records from."""
    store = tmp_path_factory.mktemp("pairs") / "store"
    timing = vivace.Timing(repeats=1, max_warmup=1)
    comparison = vivace.compare(
        "tiny-sd", "baseline", "baseline", max_pairs=3, max_minutes=0.0001, store=store, num_inference_steps=1,
        device="cpu", timing=timing,
    )  # fmt: skip
    assert comparison.stopped_by == "minutes"
    assert comparison.decision is not None
    assert comparison.decision.verdict is Verdict.UNCLEAR
    assert [record.trial.title for record in comparison.records] == ["baseline", "baseline #2"]
    return [record.trial for record in comparison.records], comparison.records[0].environment


Measure = Callable[[int], list[Record]]


@pytest.fixture
def measured(trials_and_environment: tuple[list[Any], Environment]) -> Callable[..., Measure]:
    trials, environment = trials_and_environment

    def measuring(seconds: Sequence[float], failing_at: int | None = None) -> Measure:
        """Return what measures both recipes; the second takes `seconds`, and fails in one round."""

        def measure(number: int) -> list[Record]:
            records = []
            for trial, time_s in zip(trials, seconds, strict=True):
                rounds = []
                for index in range(number):
                    wobble = 1 + 0.001 * (-1) ** index
                    samples = [
                        Sample(
                            picture=0,
                            total_s=time_s * wobble,
                            cpu_s=0,
                            stages_s={"steps": 1},
                            num_denoiser_calls=1,
                        )
                    ] * 3
                    has_failed = failing_at == index and trial is trials[1]
                    rounds.append(
                        Round(
                            index=index,
                            outcome=Outcome.CRASHED if has_failed else Outcome.MEASURED,
                            reason="the process ended" if has_failed else None,
                            started_at="2026-01-01T00:00:00+00:00",
                            samples=() if has_failed else tuple(samples),
                        )
                    )
                records.append(Record(trial=trial, environment=environment, rounds=tuple(rounds)))
            return records

        return measure

    return measuring


@pytest.mark.parametrize(
    ("seconds", "verdict", "code"),
    [((1.0, 1.5), Verdict.SLOWER, 1), ((1.5, 1.0), Verdict.FASTER, 0), ((1.0, 1.0), Verdict.SAME, 0)],
)
def test_it_stops_when_the_verdict_is_sure(
    measured: Callable[..., Measure], seconds: tuple[float, float], verdict: Verdict, code: int
) -> None:
    decisions: list[Decision] = []
    settings = PairSettings(on_pair=lambda decision, records: decisions.append(decision))
    comparison = measure_pairs(measured(seconds), 0, settings)
    assert comparison.decision is not None
    assert comparison.decision.verdict is verdict
    assert (comparison.stopped_by, answer_of(comparison).data["exit_code"]) == ("verdict", code)
    assert [decision.num_pairs for decision in decisions] == list(range(1, comparison.decision.num_pairs + 1))
    assert comparison.decision.num_pairs < 32


@pytest.mark.parametrize(
    ("slowdown", "code", "message"),
    [
        (1.02, 0, "not slower by more than 3 %"),
        (1.03, 5, "give a larger --max-pairs"),
        (1.06, 1, "3 % is allowed"),
    ],
)
def test_an_allowed_slowdown(
    measured: Callable[..., Measure], slowdown: float, code: int, message: str
) -> None:
    comparison = measure_pairs(measured((1.0, slowdown)), 0, PairSettings(fail_if=0.03, max_pairs=16))
    answer = answer_of(comparison)
    assert answer.data["exit_code"] == code
    assert message in answer.headline
    (case,) = answer.cases
    assert (case.outcome, message in case.message) == ({0: "passed", 1: "failure", 5: "error"}[code], True)
    assert ("<failure" in junit_of(answer), "<error" in junit_of(answer)) == (code == 1, code == 5)
    assert f"{100 * (slowdown - 1):.1f} % more time" in answer.headline


def test_a_failed_round_is_no_verdict(measured: Callable[..., Measure]) -> None:
    comparison = measure_pairs(measured((1.0, 1.0), failing_at=1), 0, PairSettings())
    assert comparison.decision is None
    assert answer_of(comparison).data["exit_code"] == 4
    assert answer_of(comparison).headline == "baseline #2: crashed: the process ended"
    assert comparison.to_dict()["outcomes"] == ["measured", "crashed"]


def test_stored_pairs_count_and_are_looked_at_first(measured: Callable[..., Measure]) -> None:
    numbers = []

    def measure(number: int) -> list[Record]:
        numbers.append(number)
        return measured((1.0, 1.5))(number)

    measure_pairs(measure, 8, PairSettings())
    assert numbers == [8]


@pytest.mark.soak
def test_a_real_comparison_is_stored_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ("--junit", "x.xml", "--summary", "x.md")
    arguments = ("compare", "baseline", "steps:1", *SHORT, "--format", "json", "--store", "s", *files)
    run_trials = pairs.run_trials  # type: ignore[attr-defined]

    def interrupted(*positional: Any, **named: Any) -> list[Record]:
        record = run_trials(*positional, **named)
        if positional[2].rounds == 2:
            raise KeyboardInterrupt
        return record

    with monkeypatch.context() as patch:
        patch.setattr(pairs, "run_trials", interrupted)
        done = run_vivace(tmp_path, *arguments, code=130)
    assert "To continue" in done.stderr
    store = Store.read_only(tmp_path / "s")
    keys = store.runs()[0].keys
    before = [store.rounds(key) for key in keys]
    assert [len(rounds) for rounds in before] == [2, 2]
    answer = json.loads(run_vivace(tmp_path, *arguments).stdout)
    assert answer["pairs"] == 3
    assert "faster" in (tmp_path / "x.md").read_text()
    assert 'failures="0"' in (tmp_path / "x.xml").read_text()
    assert (answer["verdict"], answer["exit_code"]) == ("faster", 0)
    assert answer["time_ratio"] < 0.7
    after = [store.rounds(key) for key in keys]
    store.close()
    assert [{k: rounds[k] for k in old} for old, rounds in zip(before, after, strict=True)] == before


@pytest.mark.parametrize("text", ["3", "three%", "-1%", "nan%", "2000%"])
def test_not_a_percentage(text: str, tmp_path: Path) -> None:
    done = run_vivace(tmp_path, "compare", "baseline", "bf16", "--fail-if", text, code=2)
    assert "is not a percentage" in done.stderr


def test_the_dictionary_has_the_interval(measured: Callable[..., Measure]) -> None:
    comparison = measure_pairs(measured((1.0, 1.5)), 0, PairSettings(fail_if=0.03))
    assert isinstance(comparison, Paired)
    as_dict = comparison.to_dict()
    assert (as_dict["regressed"], as_dict["fail_if"], as_dict["stopped_by"]) == (True, 0.03, "verdict")
    assert as_dict["time_ratio"] == pytest.approx(1.5)
    assert as_dict["interval"][0] < 1.5 < as_dict["interval"][1]
