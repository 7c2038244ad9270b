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
from vivace.benchmark.pairs import Paired, _sequential, outlook, pair_seconds
from vivace.benchmark.pairs_answer import answer_of
from vivace.benchmark.store import Store
from vivace.cli.measuring.compare import parse_percentage
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
    comparison = _sequential(
        measured(seconds), 0, None, 32, 1e9, lambda decision, records: decisions.append(decision)
    )
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
    comparison = _sequential(measured((1.0, slowdown)), 0, 0.03, 16, 1e9, None)
    answer = answer_of(comparison)
    assert answer.data["exit_code"] == code
    assert message in answer.headline
    (case,) = answer.cases
    assert (case.outcome, message in case.message) == ({0: "passed", 1: "failure", 5: "error"}[code], True)
    assert ("<failure" in junit_of(answer), "<error" in junit_of(answer)) == (code == 1, code == 5)
    assert f"{100 * (slowdown - 1):.1f} % more time" in answer.headline


def test_a_failed_round_is_no_verdict(measured: Callable[..., Measure]) -> None:
    comparison = _sequential(measured((1.0, 1.0), failing_at=1), 0, None, 32, 1e9, None)
    assert comparison.decision is None
    assert answer_of(comparison).data["exit_code"] == 4
    assert answer_of(comparison).headline == "baseline #2: crashed: the process ended"
    assert comparison.to_dict()["outcomes"] == ["measured", "crashed"]


def test_stored_pairs_count_and_are_looked_at_first(measured: Callable[..., Measure]) -> None:
    numbers = []

    def measure(number: int) -> list[Record]:
        numbers.append(number)
        return measured((1.0, 1.5))(number)

    _sequential(measure, 8, None, 32, 1e9, None)
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


@pytest.mark.parametrize(("text", "share"), [("3%", 0.03), ("0.5 %", 0.005), ("0%", 0.0)])
def test_percentages(text: str, share: float) -> None:
    assert parse_percentage(text) == pytest.approx(share)


def test_an_unknown_recipe_is_found_before_anything_starts(tmp_path: Path) -> None:
    done = run_vivace(tmp_path, "compare", "baseline", "fp9", code=2)
    assert "fp9" in done.stderr
    assert not (tmp_path / ".vivace").exists()


def test_the_dictionary_has_the_interval(measured: Callable[..., Measure]) -> None:
    comparison = _sequential(measured((1.0, 1.5)), 0, 0.03, 32, 1e9, None)
    assert isinstance(comparison, Paired)
    as_dict = comparison.to_dict()
    assert (as_dict["regressed"], as_dict["fail_if"], as_dict["stopped_by"]) == (True, 0.03, "verdict")
    assert as_dict["time_ratio"] == pytest.approx(1.5)
    assert as_dict["interval"][0] < 1.5 < as_dict["interval"][1]


AUTO, FIXED = vivace.Timing(), vivace.Timing(repeats=3)


@pytest.mark.parametrize(
    ("max_s", "num_pairs", "pair_s", "timing", "says"),
    [
        (
            60,
            0,
            58.0,
            AUTO,
            "needs 3 pairs, 3 more than there are, and a pair takes about 58 s: --max-minutes 1 ends",
        ),
        (60, 0, None, AUTO, "may end before; give --max-minutes 4 or more"),
        (60, 0, None, FIXED, None),
        (60, 0, 10.0, AUTO, None),
        (3600, 0, None, AUTO, None),
        (60, 3, 58.0, AUTO, None),  # they may decide already
        (60, 5, 90.0, AUTO, None),  # the one that is missing may be begun
        (60, 6, 90.0, AUTO, None),
        (60, 9, 90.0, AUTO, "needs 12 pairs, 3 more than there are"),
    ],
)
def test_too_little_time_is_said_before_it_is_spent(
    max_s: float, num_pairs: int, pair_s: float | None, timing: vivace.Timing, says: str | None
) -> None:
    note = outlook(max_s, num_pairs, 32, pair_s, timing)
    assert (note is None) if says is None else (note is not None and says in note)


def test_after_the_first_pair_the_time_is_known(measured: Callable[..., Measure]) -> None:
    calls: list[int] = []
    _sequential(measured((1.0, 1.0)), 0, None, 4, 1e9, None, lambda number, seconds: calls.append(number))
    assert calls == [1]
    note = outlook(60, 1, 32, 45.0, AUTO, begun=True)
    assert note is not None
    assert note.endswith("give --max-minutes 2 or more")
    assert outlook(60, 1, 32, 25.0, AUTO, begun=True) is None
    calls.clear()
    _sequential(measured((1.0, 1.0)), 4, None, 4, 1e9, None, lambda number, seconds: calls.append(number))
    assert calls == [], "stored pairs take no time"


def test_a_pair_takes_what_stored_rounds_took(measured: Callable[..., Measure]) -> None:
    rounds = [record.rounds for record in measured((1.0, 2.0))(2)]
    assert pair_seconds(rounds) == pytest.approx(2.5 * 4.5, rel=0.01)
    assert pair_seconds([(), ()]) is None
