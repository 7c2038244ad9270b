"""Predicted memory compared with the memory measured on a GPU."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.make import make_record, make_round
from vivace.benchmark import studies
from vivace.benchmark.rounds.work import plan_again
from vivace.cli import main
from vivace.foundation.spec.record import Memory, Outcome, Record, Round
from vivace.foundation.spec.trial import Model
from vivace.runtime.memory.predict import predict_trial


def on_a_gpu(record: Record, model: str = "tiny-sd", model_bytes: int = 1, peak_bytes: int = 1) -> Record:
    """Return the record as if from a GPU, with this memory in the second round and less in the first."""
    environment = record.environment.model_copy(
        update={"device": "cuda", "device_name": "a test GPU", "device_capability": "9.0"}
    )
    trial = record.trial.model_copy(
        update={"device": "cuda", "model": Model(name=model, source="embedded", revision="0" * 16)}
    )

    def memory(share: float) -> Memory:
        return Memory(
            kind="device memory allocated",
            before_bytes=0,
            model_bytes=round(share * model_bytes),
            peak_bytes=round(share * peak_bytes),
            weights_bytes=1,
        )

    rounds: list[Round] = [
        round_.model_copy(update={"memory": memory(share)})
        for round_, share in zip(record.rounds, (0.9, 1.0), strict=False)
    ]
    return record.model_copy(update={"environment": environment, "trial": trial, "rounds": tuple(rounds)})


@pytest.mark.long
def test_each_measured_record_is_compared_with_its_prediction() -> None:
    predicted = predict_trial(make_record("tiny_vae").trial)
    measured = {"model_bytes": predicted.model_bytes, "peak_bytes": round(predicted.peak_bytes / 1.25)}
    fine = on_a_gpu(make_record("tiny_vae", make_round(0), make_round(1)), **measured)
    crashed = on_a_gpu(make_record("bf16", make_round(0, outcome=Outcome.CRASHED, reason="it did")))
    elsewhere = on_a_gpu(make_record("baseline", make_round(0), make_round(1)), model="org/repo")
    with studies.start_launcher("cpu") as launcher:
        compared = plan_again([fine, crashed, elsewhere], launcher)
    assert [comparison.record for comparison in compared] == [fine, elsewhere], (
        "only measured trials are predicted"
    )
    assert compared[0].model_bytes == predicted.model_bytes
    assert compared[0].peak_bytes == predicted.peak_bytes
    line = str(compared[0])
    assert line.startswith("plan, tiny_vae: model ")
    assert line.count("measured") == 2
    assert ", +0.0 %), peak" in line
    assert line.endswith(f", +25.0 %), in stage {predicted.peak_stage}")
    assert str(compared[1]).startswith("plan, baseline: no prediction: no model 'org/repo'")


@pytest.mark.long
def test_bench_prints_predictions_after_measuring_unless_declined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    num_records: list[int] = []

    def fake(records: Sequence[Record], launcher: object) -> list[str]:
        num_records.append(len(records))
        return ["plan, baseline: model and peak"]

    monkeypatch.setattr(studies, "plan_again", fake)
    command = ["bench", "--recipe", "baseline", "--num-inference-steps", "1", "--rounds", "1"]
    command += ["--repeats", "1", "--warmup", "1", "--no-quality", "--device", "cpu"]
    for flags, is_said in (([], True), ([], False), (["--rerun", "--no-plan"], False)):
        monkeypatch.setattr(sys, "argv", ["vivace", *command, *flags])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 0
        done = capfd.readouterr()
        assert ("plan, baseline: model and peak" in done.err) == is_said
        assert num_records == [1], "only after measuring, and not with --no-plan"
        assert "plan," not in done.out
