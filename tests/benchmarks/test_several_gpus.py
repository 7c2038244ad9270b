"""The script that measures several GPUs against one, and its page: resumed, compared with the right row, in words."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import several_gpus
from benchmarks.command import run
from benchmarks.record_files import write_records
from benchmarks.several_gpus import cases, profile_file, read_profiles
from benchmarks.several_gpus import several_gpus as command
from benchmarks.step_profile import Profile
from benchmarks.technique_records import read_records
from docgen import several_gpus as pages
from docgen.generate import NOTE
from tests.make import make_record, make_round
from tests.narrow import make_all_small
from vivace.foundation.spec.record import Outcome, Record, Round
from vivace.foundation.stats import Interval
from vivace.models.find import find_model
from vivace.recipes.resolve import resolve

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


def case(name: str, recipe: str, *rounds: Round) -> Record:
    record = make_record(recipe, *rounds)
    trial = record.trial.model_copy(update={"model": find_model(f"synthetic:{name}").model, "device": "cuda"})
    environment = record.environment.model_copy(
        update={"device": "cuda", "device_name": "Test GPU", "source_revision": "0123abc"}
    )
    return record.model_copy(update={"trial": trial, "environment": environment})


def round_of(seconds: float, **changes: Any) -> Round:
    return make_round(0, (seconds,) * 4).model_copy(update=changes)


def test_the_page_compares_with_one_gpu_of_the_same_recipe(tmp_path: Path) -> None:
    path = tmp_path / "several-gpus.json"
    evidence = {"peer_1.peak_bytes": 3 * 10**9, "bytes_exchanged_a_forward": 2_000_000}
    ours, gathered, four = cases(2)[2], cases(2)[3], cases(4)[2]
    assert ours.alone == gathered.alone == four.alone
    alone, ulysses = ours.alone, ours.recipe
    write_records(
        path,
        [
            case("flux-dev", alone, round_of(6.0)),
            case("flux-dev", ulysses, round_of(3.0, evidence=evidence)),
            case("flux-dev", gathered.recipe, round_of(5.0, evidence=evidence)),
            case("flux-dev", four.recipe, make_round(0, outcome=Outcome.CRASHED, reason="GPU 3 ended")),
            case("sdxl", "baseline", round_of(3.0)),
            case("sdxl", "parallel(cfg)", round_of(2.0, evidence=evidence)),
        ],
    )
    assert pages.soonest(path) == [
        f"- flux-dev on 2: `{resolve(ulysses).text}` 3.00 s ±0.0 %, 2.00x [2.00, 2.00] the speed of one GPU.",
        "- sdxl on 2: `parallel(cfg)` 2.00 s ±0.0 %, 1.50x [1.50, 1.50] the speed of one GPU.",
    ]
    text = pages.page(NOTE, path)
    assert "`git log 0123abc.. -- src/vivace/techniques src/vivace/machinery/multi_gpu`" in text
    rows = [line for line in text.splitlines() if line.startswith(("| flux-dev", "| sdxl"))]
    assert len(rows) == 5, "each row once"
    assert "| 1 |" in rows[0]
    assert "2.00x" in rows[1]
    assert "1.7x: reached" in rows[1]
    assert "3.00 GB" in rows[1]
    assert "1.7x: not reached" in rows[2]
    assert [
        pages._reached(Interval(1.65, low, high), 1.6)
        for low, high in ((1.61, 1.7), (1.5, 1.59), (1.55, 1.7), (None, None))
    ] == ["reached", "not reached", "cannot tell", "cannot tell"]
    assert "1.50x" in rows[4], "against its own eager row, without a wish"
    assert "- flux-dev `" in text
    assert "crashed: GPU 3 ended" in text
    assert "Where the time" not in text

    profiles = [Profile("flux-dev", ulysses, 2, 100.0, 80.0, 12.0, 5.0, 3.0, 2.0, 40.0)]
    profile_file(path).write_text(json.dumps([vars(profile) for profile in profiles]))
    assert read_profiles(path) == profiles
    text = pages.page(NOTE, path)
    assert "| 100.0 ms | 80.0 ms | 12.0 ms | 5.0 ms | 3.0 ms | 2.0 ms | 40.0 ms |" in text
    assert "beyond 1/N of a step on one" not in text, "of which there is no profile"
    alone = "+".join(part for part in ulysses.split("+") if "parallel" not in part)
    profiles.insert(0, Profile("flux-dev", alone, 1, 150.0, 148.0, 0.0, 0.0, 2.0, 1.0, 40.0))
    profiles.append(Profile("flux-dev", alone, 1, 180.0, 178.0, 0.0, 0.0, 2.0, 1.0, 40.0))  # of a later run
    profile_file(path).write_text(json.dumps([vars(profile) for profile in profiles]))
    line = (
        f"- flux-dev `{ulysses}`: 25.0 ms (6.0 ms compute, 17.0 ms communication and waiting, 2.0 ms idle)."
    )
    assert line in pages.page(NOTE, path).splitlines()
