"""The script that measures several GPUs against one, and its page: resumed, compared with the right row, in words."""

from pathlib import Path

import pytest

from benchmarks import several_gpus
from benchmarks.command import run
from benchmarks.several_gpus import several_gpus as command
from benchmarks.technique_records import read_records
from tests.narrow import make_all_small
from vivace.foundation.spec.record import Outcome

pytestmark = pytest.mark.long  # a script that measures, beside the package and not in it


@pytest.mark.soak
def test_on_a_cpu_processes_take_the_places_of_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_all_small(monkeypatch)
    monkeypatch.setattr(several_gpus, "UNET", (("channels_last", 1.6), ("baseline", None)))
    record = tmp_path / "record.json"
    quick = ["--repeats", "1", "--warmup", "1", "--steps", "2", "--device", "cpu", "--only", "sdxl"]
    arguments = [*quick, "--record", str(record), "--store", str(tmp_path / "store")]
    assert run(command, arguments) == 0
    records = {stored.trial.recipe.text: stored for stored in read_records(record)}
    assert list(records) == [
        "channels_last",
        "channels_last+parallel(cfg)",
        "baseline",
        "parallel(cfg)",
    ]
    assert all(measurement.outcome is Outcome.MEASURED for measurement in records.values())
    evidence = records["parallel(cfg)"].rounds[0].evidence
    assert evidence["forwards_shared"] > 0
    assert evidence["peer_1.peak_bytes"] > 1e6
    assert len(capfd.readouterr().out.splitlines()) == 4
    assert run(command, arguments) == 0
    assert capfd.readouterr().out == "", "the same command has nothing left to do"
    assert run(command, [*arguments, "--limit-s", "0", "--record", str(tmp_path / "other.json")]) == 4
