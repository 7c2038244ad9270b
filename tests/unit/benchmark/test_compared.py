"""A comparison is judged by the limits that were calibrated on this machine, and says where they come from."""

from pathlib import Path

import pytest

from tests.make import make_record
from vivace.benchmark.run import Run
from vivace.benchmark.store.compared import Compared, Invocation
from vivace.cli.measuring.bench import show_run
from vivace.foundation.spec.figures import QualityPass
from vivace.foundation.spec.limits import Limits, WitnessCalibration
from vivace.foundation.spec.study import Study
from vivace.measure.witness_limits import keep

SCORER = "openai/clip@2"
RECORDS = (make_record("baseline"), make_record("tiny_vae"))
RUN = Invocation("2026-11-28T00:00:00Z", "vivace bench", ("a", "b"), SCORER)


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """Keep a calibration of the scorer for the records' model, and return its limit."""
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path))
    model = RECORDS[0].trial.model
    calibration = WitnessCalibration(
        model=f"{model.name}@{model.revision}",
        scorer=SCORER,
        kind="clip",
        limit=0.91,
        grade=4,
        num_images=39,
        num_prompts=13,
        margin=10.0,
        harmless={},
        damage=(),
        faint=(),
        workload={},
        environment={},
        made="2026-11-28",
    )
    keep(calibration)
    return 0.91


def compared(run: Invocation | None = RUN) -> Compared:
    return Compared(RECORDS, QualityPass(scorer=SCORER), run)


def test_a_store_is_judged_by_what_was_calibrated(calibrated: float) -> None:
    assert compared().rows()[1].limits.clip == calibrated
    assert compared().rows(Limits(clip=0.8))[1].limits.clip == 0.8


def test_bench_says_what_its_limit_rests_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path / "empty"))
    run = Run(Study.of("tiny-sd", ["baseline", "tiny_vae"]), Path("store"), (compared(), compared()))
    show_run(run, "csv", "vivace bench")
    notes = capsys.readouterr().err
    name = RECORDS[0].trial.model.name
    assert notes.endswith(
        "note: no calibration of openai/clip for photographs: its limit (95 %) comes from drawn shapes; vivace "
        f"calibrate witness --model {name} --witness clip:openai/clip\n"
    )


def test_bench_says_that_its_limit_was_calibrated(
    calibrated: float, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(Study.of("tiny-sd", ["baseline", "tiny_vae"]), Path("store"), (compared(),))
    show_run(run, "csv", "vivace bench")
    assert "the limit of openai/clip (91 %) was calibrated on 39 images" in capsys.readouterr().err
    show_run(run, "csv", "vivace bench", Limits(clip=0.8))
    assert "calibrat" not in capsys.readouterr().err
