"""Statistics and words of the rows, and their sanity."""

import csv
import io

import pytest

from tests.make import make_record, make_round
from vivace.answers.data import written
from vivace.foundation.spec.record import Outcome, Record, Round
from vivace.foundation.stats import Verdict
from vivace.report.rows import rows_of, shared_warnings
from vivace.report.run_answer import answer_of
from vivace.report.summary import summary

FAST = (0.5, 0.51, 0.49, 0.5)
SLOW = (1.0, 1.02, 0.98, 1.0)


def records() -> list[Record]:
    return [
        make_record("baseline", make_round(0, SLOW), make_round(1, SLOW)),
        make_record("tiny_vae", make_round(0, FAST), make_round(1, FAST)),
        make_record(
            "attention(cudnn)", make_round(0, outcome=Outcome.UNSUPPORTED, reason="no | kernel, here")
        ),
    ]


def test_rows_are_sane() -> None:
    baseline, fast, failed = rows_of(records())
    for row in (baseline, fast):
        assert row.latency is not None
        low, high = row.latency.median.low, row.latency.median.high
        assert low is not None
        assert high is not None
        assert low <= row.latency.median.point <= high
        assert row.latency.min_s <= row.latency.median.point <= row.latency.max_s
        assert row.latency.min_s <= row.latency.mean_s <= row.latency.max_s
        assert sum(row.stages_s.values()) == pytest.approx(row.latency.median.point, rel=0.03)
    assert baseline.speedup is None
    assert fast.speedup is not None
    assert fast.speedup.point == pytest.approx(2.0)
    assert fast.verdict is Verdict.FASTER
    assert failed.latency is None
    assert failed.reason == "no | kernel, here"


def test_percentiles_need_samples_enough() -> None:
    def row(n: int):
        return rows_of([make_record("baseline", make_round(0, tuple(1 + i / n for i in range(n))))])[0]

    assert row(9).latency.p90_s is None
    assert row(10).latency.p90_s == pytest.approx(1.8), "the ninth of ten"
    assert row(99).latency.p99_s is None
    latency = row(100).latency
    assert latency.median.point <= latency.p90_s <= latency.p99_s <= latency.max_s


def test_a_round_that_failed_makes_no_half_row() -> None:
    crashed = make_round(1, outcome=Outcome.CRASHED, reason="SIGSEGV")
    _, row = rows_of([records()[0], make_record("tiny_vae", make_round(0, FAST), crashed)])
    assert row.outcome is Outcome.CRASHED
    assert row.latency is None
    assert row.speedup is None


def test_the_verdict_claims_no_more_than_the_intervals_allow() -> None:
    assert summary(rows_of(records())).startswith("tiny_vae is the fastest: 2.00x")
    assert "Compare the images before you trust it" in summary(rows_of(records()))
    assert "1 of 3 recipes could not be measured" in summary(rows_of(records()))
    noisy = make_record("bf16", make_round(0, (0.8, 1.3, 0.9)), make_round(1, (1.2, 0.7, 1.1)))
    assert summary(rows_of([records()[0], noisy])).startswith("No recipe was faster")
    broken = make_record("baseline", make_round(0, outcome=Outcome.CRASHED, reason="SIGSEGV"))
    assert "SIGSEGV" in summary(rows_of([broken, *records()[1:]]))
    assert rows_of([broken, *records()[1:]])[1].speedup is None


def test_a_row_of_another_speed_of_the_cpu_has_no_verdict() -> None:
    def at(python_ms: float) -> tuple[Round, ...]:
        return tuple(
            make_round(i, FAST if python_ms > 10 else SLOW).model_copy(
                update={"conditions": {"python_ms": python_ms}}
            )
            for i in range(2)
        )

    _, row = rows_of([make_record("baseline", *at(10.0)), make_record("tiny_vae", *at(15.0))])
    assert "not comparable" in row.warnings[-1]
    assert row.verdict is Verdict.UNCLEAR


@pytest.mark.parametrize(
    ("busy_s", "expected"), [(0.45, Verdict.FASTER), (0.3, Verdict.UNCLEAR), (None, Verdict.UNCLEAR)]
)
def test_the_interval_of_a_busy_gpu_allows_for_a_changed_cpu(busy_s: float | None, expected: Verdict) -> None:
    """0.05 s of waiting on a CPU of twice the speed would be 0.1 s on the baseline's: 0.55 instead of 0.5 s."""

    def at(python_ms: float, busy_s: float | None, times: tuple[float, ...]) -> tuple[Round, ...]:
        update = {"conditions": {"python_ms": python_ms}, "gpu_busy_s": busy_s}
        return tuple(make_round(i, times).model_copy(update=update) for i in range(2))

    baseline = make_record("baseline", *at(4.0, 0.5, (0.8, 0.81, 0.79, 0.8)))
    half = (0.5, 0.5, 0.5, 0.5)
    _, same = rows_of([baseline, make_record("tiny_vae", *at(4.0, busy_s, half))])
    _, row = rows_of([baseline, make_record("tiny_vae", *at(2.0, busy_s, half))])
    assert row.verdict is expected
    assert row.speedup is not None
    assert same.speedup is not None
    assert row.speedup.high == same.speedup.high
    assert ("the interval allows for it" in row.warnings[-1]) is (busy_s == 0.45)
    if busy_s == 0.45:
        assert same.speedup.low is not None
        assert row.speedup.low == pytest.approx(same.speedup.low * 0.5 / 0.55)
        assert "busy 90% of the time" in row.warnings[-1]


def test_one_round_says_so() -> None:
    _, row = rows_of([make_record("baseline", make_round(0, SLOW)), make_record("bf16", make_round(0, FAST))])
    assert row.warnings == ("one round only: differences under 10 % cannot be told from drift",)
    assert row.verdict is Verdict.FASTER, "twice as fast is more than drift"


def test_random_weights_are_said_in_every_row() -> None:
    def synthetic(recipe: str, seconds: tuple[float, ...]) -> Record:
        record = make_record(recipe, make_round(0, seconds), make_round(1, seconds))
        model = record.trial.model.model_copy(update={"name": "synthetic:flux-dev", "source": "synthetic"})
        return record.model_copy(update={"trial": record.trial.model_copy(update={"model": model})})

    rows = rows_of([synthetic("baseline", SLOW), synthetic("steps(12)", FAST)])
    assert all(row.warnings[0].startswith("random weights:") for row in rows)
    assert shared_warnings(rows)[0].startswith("random weights:")
    assert summary(rows).endswith("Random weights: its effect on image quality is not known.")
    table = list(csv.DictReader(io.StringIO(written(answer_of(rows), "csv"))))
    assert all("random weights" in row["warnings"] for row in table)


def test_a_cpu_that_became_slower_is_told_beside_what_suffers() -> None:
    def record(recipe: str, before: float, after: float) -> Record:
        round_ = make_round(0).model_copy(
            update={"conditions": {"python_ms": before, "python_after_ms": after}}
        )
        return make_record(recipe, round_)

    baseline = record("baseline", 5.0, 5.2)
    _, same, slow, fast = rows_of(
        [baseline, record("bf16", 5.6, 5.5), record("tiny_vae", 9.0, 9.8), record("channels_last", 2.5, 2.6)]
    )
    assert not [w for w in same.warnings if "the CPU" in w]
    (warning,) = [w for w in slow.warnings if "the CPU" in w]
    assert warning.startswith("the CPU ran Python 1.8 times as slowly as while the baseline was measured")
    assert any("2.0 times as fast" in w for w in fast.warnings)
    lost = make_record("tf32", make_round(0, outcome=Outcome.UNSUPPORTED, reason="no tensor cores"))
    lost_round = lost.rounds[0].model_copy(update={"conditions": {"python_ms": 9.0}})
    (_, row) = rows_of([baseline, lost.model_copy(update={"rounds": (lost_round,)})])
    assert row.warnings == (), "it has no time that could be wrong"


def held_up(share: float) -> Round:
    """A round whose process got that share of its thread's time."""
    round_ = make_round(0, FAST)
    samples = tuple(s.model_copy(update={"cpu_s": share * s.total_s}) for s in round_.samples)
    return round_.model_copy(update={"samples": samples})


@pytest.mark.parametrize(
    ("share", "expected"), [(0.95, Verdict.FASTER), (0.7, Verdict.FASTER), (0.45, Verdict.UNCLEAR)]
)
@pytest.mark.parametrize("which", ["recipe", "baseline"])
def test_a_gain_that_a_delay_by_other_programs_explains_has_no_verdict(
    share: float, expected: Verdict, which: str
) -> None:
    disturbed = [held_up(share), make_round(1, FAST)]
    calm = [make_round(0, SLOW), make_round(1, SLOW)]
    if which == "baseline":  # a slower baseline, of which one round was held up
        slow = make_round(0, SLOW)
        samples = tuple(s.model_copy(update={"cpu_s": share * s.total_s}) for s in slow.samples)
        calm[0] = slow.model_copy(update={"samples": samples})
        disturbed[0] = make_round(0, FAST)
    baseline, row = rows_of([make_record("baseline", *calm), make_record("tiny_vae", *disturbed)])
    assert row.verdict is expected
    affected = baseline if which == "baseline" else row
    assert any("another program kept the CPU busy" in w for w in affected.warnings) is (share < 0.9)
