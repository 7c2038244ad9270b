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
from benchmarks.step_profile import Profile, cpu_a_step, launch_bound, where_time_goes
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


def test_the_wished_for_comes_first() -> None:
    listed = [(case.name, case.mode, case.target) for case in cases(2)]
    assert listed[:2] == [("flux-dev", "ulysses", 1.7), ("flux-dev", "all_gather", 1.7)]
    assert listed[-5:] == [*[("sdxl", "cfg", 1.6)] * 4, ("sdxl", "cfg", None)]
    of_sdxl = [case for case in cases(2) if case.name == "sdxl"]
    assert [case.alone for case in of_sdxl] == [
        "cuda_graph", "compile+cuda_graph", "channels_last+compile@denoiser,vae+cuda_graph", "compile", "baseline",
    ]  # fmt: skip
    assert [case.recipe for case in of_sdxl] == [
        "parallel(cfg)+cuda_graph", "parallel(cfg)+compile+cuda_graph",
        resolve("parallel(cfg)+channels_last+compile@denoiser,vae+cuda_graph").text,
        "parallel(cfg)+compile", "parallel(cfg)",
    ]  # fmt: skip
    *of_flux, cached = [case for case in cases(2) if case.name == "flux-dev"]
    assert cached.alone.startswith("teacache(hits=0.5)+")
    assert cached.target is None
    assert [case.mode for case in of_flux if "fused" in case.alone] == ["all_gather"] * 3
    assert {case.alone for case in of_flux if "fused" not in case.alone} == {
        f"compile{blocks}{graph}" for blocks in ("", "(blocks=repeated)") for graph in ("", "+cuda_graph")
    }
    assert {case.target for case in cases(4) if case.name == "flux-dev"} == {2.9, None}
    assert all(case.gpus == 2 for case in cases(4) if case.name == "sdxl")


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


def test_older_records_are_read_by_their_present_names(tmp_path: Path) -> None:
    """And what was measured with an option that has been removed has its row, though it can be used no longer."""
    path = tmp_path / "several-gpus.json"
    two = cases(2)[1]
    assert two.recipe.startswith("parallel(all_gather)+")
    made = [
        case("flux-dev", two.alone, round_of(6.0)),
        case("flux-dev", two.recipe, round_of(3.0)),
        case("flux-dev", two.recipe, round_of(2.0)),
    ]
    records = []
    for measurement, mode in zip(
        made, ("", "parallel(ring)", "parallel(ring, messages=copies)"), strict=True
    ):
        text = measurement.trial.recipe.text.replace("parallel(all_gather)", mode)
        recipe = measurement.trial.recipe.model_copy(update={"text": text})
        records.append(
            measurement.model_copy(update={"trial": measurement.trial.model_copy(update={"recipe": recipe})})
        )
    write_records(path, records)
    assert several_gpus._left([two], {two.recipe, resolve(two.alone).text}, read_records(path)) == []
    markdown = pages.page(NOTE, path)
    rows = [line for line in markdown.splitlines() if line.startswith("| flux-dev")]
    assert len(rows) == 3
    assert f"`{two.recipe}` | 2 | 3.00 s" in rows[1]
    assert "`parallel(all_gather, messages=copies)+" in rows[2]
    assert "3.00x" in rows[2]
    assert "measured with an option that has been removed" in markdown
    assert "`ring` for `all_gather`" in markdown
    (soonest,) = pages.soonest(path)
    assert f"`{two.recipe}` 3.00 s" in soonest


def test_a_row_stays_with_one_gpu_of_its_own_run(tmp_path: Path) -> None:
    """Another run may be on another machine: it measures one GPU anew, and older rows keep theirs."""
    path = tmp_path / "several-gpus.json"
    two, four = cases(2)[0], cases(4)[0]
    old, new = case("flux-dev", two.alone, round_of(6.0)), case("flux-dev", two.alone, round_of(4.0))
    records = [old, case("flux-dev", two.recipe, round_of(3.0)), case("flux-dev", four.recipe, round_of(2.0))]
    for measurement in (new, case("flux-dev", two.recipe, round_of(2.5))):
        records = several_gpus._with(records, measurement, path)
    assert several_gpus.pair(two, records) == (new, records[-1])
    assert several_gpus.pair(four, records) == (old, records[1])
    assert len(records) == 4
    latest = case("flux-dev", two.alone, round_of(5.0))
    records = several_gpus._with(records, latest, path)
    records = several_gpus._with(records, case("flux-dev", two.alone, round_of(5.5)), path)
    assert latest not in records, "nothing was measured behind it"
    write_records(path, records)
    rows = [line for line in pages.page(NOTE, path).splitlines() if line.startswith("| flux-dev")]
    assert [row.split("|")[5].strip().split("x")[0] for row in rows] == ["1", "1.60", "1", "3.00"]
    everything = {two.recipe, resolve(two.alone).text}
    assert several_gpus._left([two], everything, records) == []
    less = [record for record in records if record.trial.recipe.text != two.recipe]
    assert several_gpus._left([two], everything, less) == [
        ("flux-dev", resolve(two.alone).text),
        ("flux-dev", two.recipe),
    ]
    assert several_gpus._left([two], {two.recipe}, less) == [("flux-dev", two.recipe)]


def test_time_is_told_apart() -> None:
    spans = [
        ("gemm", 0.0, 10.0),
        ("ncclDevKernel_SendRecv", 10.0, 12.0),  # as fast as it gets
        ("gemm", 12.0, 20.0),
        ("ncclDevKernel_SendRecv", 19.0, 25.0),  # one of it hidden, four of it too long
        ("gemm", 30.0, 40.0),
    ]
    compute, communication, waiting, idle = where_time_goes(spans)
    assert compute == 28.0
    assert idle == 5.0
    assert communication + waiting == 7.0
    assert communication == 7.0 * 4.0 / 8.0
    assert where_time_goes([("gemm", 0.0, 1.0)]) == (1.0, 0.0, 0.0, 0.0)
    copied = [
        ("gemm", 0.0, 1.0),
        ("elementwise_kernel", 1.0, 2.0),
        ("Memcpy DtoD (Device -> Device)", 2.0, 4.0),
    ]
    assert where_time_goes(copied) == (4.0, 0.0, 0.0, 0.0), "what a GPU copies for itself"
    assert launch_bound(spans, []) == 5.0
    assert launch_bound(spans, [(24.0, 27.0), (26.0, 28.0), (35.0, 40.0)]) == 2.0, (
        "waiting for two thirds of the gap"
    )
    assert cpu_a_step([0.0, 10.0, 20.0], [(5.0, 9.0), (19.0, 30.0)]) == 7.5


def test_what_is_recorded_is_profiled_and_what_is_eager_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[tuple[str, int]] = []

    def profiled(name: str, recipe: str, gpus: int, device: str) -> Profile:
        requests.append((recipe, gpus))
        return Profile(name, recipe, gpus, 100.0, 80.0, 12.0, 5.0, 3.0, 2.0, 40.0)

    monkeypatch.setattr(several_gpus, "profiled", profiled)
    record = tmp_path / "record.json"
    assert run(command, ["--profile", "--only", "sdxl", "--record", str(record)]) == 0
    assert requests == [
        ("cuda_graph", 1),
        ("parallel(cfg)+cuda_graph", 2),
        ("compile+cuda_graph", 1),
        ("parallel(cfg)+compile+cuda_graph", 2),
        (resolve("channels_last+compile@denoiser,vae+cuda_graph").text, 1),
        (resolve("parallel(cfg)+channels_last+compile@denoiser,vae+cuda_graph").text, 2),
        ("compile", 1),
        ("parallel(cfg)+compile", 2),
    ]
    recipes = [recipe for recipe, _ in requests]
    assert [profile.recipe for profile in read_profiles(record)] == recipes
    again = ["--profile", "--only", "sdxl", "--record", str(record), "--only-recipe"]
    assert run(command, [*again, "cuda_graph", "--only-recipe", "parallel(cfg)+cuda_graph"]) == 0
    assert [profile.recipe for profile in read_profiles(record)] == recipes[2:] + recipes[:2]
    assert run(command, [*again, "cuda_graph"]) == 0
    assert [profile.recipe for profile in read_profiles(record)] == recipes[2:] + recipes[:2] + recipes[:1]


def test_one_recipe_can_be_chosen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--record", str(tmp_path / "record.json"), "--limit-s", "0"]
    chosen = cases(2)[2].recipe
    assert run(command, [*arguments, "--only-recipe", chosen]) == 4
    assert f"goes on with flux-dev {chosen}" in capfd.readouterr().err
    assert run(command, [*arguments, "--only-recipe", "baseline", "--only", "flux-dev"]) == 2
    assert "baseline is none of" in capfd.readouterr().err
