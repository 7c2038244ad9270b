"""The script that measures every technique on one model: resumed, compared with the right baseline, compiled ahead."""

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks import every_technique, technique_cases, technique_records
from benchmarks.command import MEASURED_IN_PART, run
from benchmarks.every_technique import every_technique as command
from benchmarks.every_technique import fastest, finished, has_moved, is_done
from benchmarks.record_files import write_records
from benchmarks.technique_cases import (
    ALONE,
    COMPILED,
    alone,
    baseline,
    cases,
    compiled,
    configurations,
    first_calls_file,
    full_length,
)
from benchmarks.technique_records import add, add_group, key_of, num_timed, read_records, rows_with_baselines
from tests.narrow import make_all_small
from vivace.errors import StoreError
from vivace.foundation.spec.record import Outcome, Record
from vivace.recipes.resolve import resolve
from vivace.techniques import TECHNIQUES

pytestmark = pytest.mark.long  # a script that measures, beside the package and not in it

QUICK = ["--repeats", "1", "--warmup", "1", "--device", "cpu"]
RECIPES = ["inference_mode", "vae_slicing", "compile(backend=eager)"]
MODEL = "flux-dev"
"""Its baseline runs on a CPU; that of the UNets, `cuda_graph`, does not."""
SMALL = """
import sys, pytest
from benchmarks.command import run
from benchmarks.record_files import write_records
from benchmarks.every_technique import every_technique
from tests.narrow import make_all_small
with pytest.MonkeyPatch.context() as patch:
    make_all_small(patch)
    sys.exit(run(every_technique, sys.argv[1:]))
"""


def _paths(folder: Path) -> list[str]:
    return ["--record", str(folder / "record.json"), "--store", str(folder / "store")]


def _only(recipes: Sequence[str]) -> list[str]:
    return [word for recipe in recipes for word in ("--only", recipe)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patch:
        make_all_small(patch)
        patch.setattr(every_technique, "has_moved", lambda *_: None)  # a busy host is not what is tested
        assert run(command, [MODEL, *_paths(folder), *QUICK, *_only(RECIPES), "--together", "2"]) == 0
    return folder


def test_no_technique_of_the_same_picture_is_left_out() -> None:
    everything = (*ALONE, *COMPILED)
    names = {call.name for text in everything for call in resolve(text).techniques}
    # Several GPUs are benchmarks.several_gpus' to measure; fused kernels, and FLUX.2's encoder, fused_models's.
    elsewhere = {"parallel", "fused", "trim_text"}
    assert {t.name for t in TECHNIQUES.values() if t.declared.same_picture} - elsewhere <= names
    for name in technique_cases.FAMILIES:
        assert all("compile" in text for text in compiled(name))
        texts = [*alone(name), *compiled(name)]
        assert len(set(texts)) == len(everything) + 1, "half of its denoiser kept on the GPU"


def test_the_study_has_ten_configurations() -> None:
    for name in technique_cases.FAMILIES:
        configured = configurations(name)
        assert len(set(configured)) == 9, "and the baseline"
    assert "quantize(int8)@denoiser,text_encoder_2,vae" in {
        part for text in configurations("flux-dev") for part in text.split("+")
    }
    assert all("text_encoder_2" not in text for text in configurations("sd15"))


def test_a_group_is_measured_in_the_rounds_of_its_baseline(measured: Path) -> None:
    records = read_records(measured / "record.json")
    first, second, third = RECIPES
    assert [key_of(record) for record in records] == [
        (text, 8) for text in ("baseline", first, second, "baseline", third)
    ]
    assert [record.outcome for record in records] == [
        Outcome.MEASURED, Outcome.MEASURED, Outcome.NO_EFFECT, Outcome.MEASURED, Outcome.MEASURED,
    ], [record.reason for record in records]  # fmt: skip
    for beside, *news in (records[:2], records[3:]):
        assert len(beside.rounds) == 2
        assert all(len(new.rounds) == 2 for new in news)
    rows = rows_with_baselines(records)
    assert [row.is_baseline for row in rows] == [True, False, False, True, False]
    assert rows[1].speedup is not None
    assert records[-1].rounds[0].evidence["compiled_graphs"]


def test_a_group_has_one_number_of_steps() -> None:
    cases = [("a", 8), ("b", 8), ("c", 8), ("d", 8), ("e", 50), ("f", 50)]
    assert every_technique.groups(cases, 3) == [cases[:3], cases[3:4], cases[4:]]
    assert every_technique.groups(cases[:2], 1) == [cases[:1], cases[1:2]]


def test_only_what_moved_is_measured_again(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = read_records(measured / "record.json")
    requests: list[list[str]] = []

    def measure_beside(name: str, recipes: Sequence[str], *_: Any) -> list[Record]:
        requests.append(list(recipes))
        return [
            old[0],
            *(old_record for recipe in recipes for old_record in old if key_of(old_record)[0] == recipe),
        ]

    monkeypatch.setattr(every_technique, "measure_beside", measure_beside)
    monkeypatch.setattr(every_technique, "has_moved", lambda _, new: "so" if new is old[-1] else None)
    assert run(command, [MODEL, *_paths(tmp_path), *QUICK, *_only(RECIPES)]) == 0
    assert requests == [RECIPES, RECIPES[2:]]
    records = read_records(tmp_path / "record.json")
    assert [key_of(record)[0] for record in records] == ["baseline", *RECIPES[:2], "baseline", RECIPES[2]]


def test_unets_are_compared_with_captured_ones() -> None:
    assert [baseline(name) for name in technique_cases.FAMILIES] == ["cuda_graph", "cuda_graph", "baseline"]
    texts = alone("sdxl")
    assert texts[0] == "baseline", "the eager model is a row"
    assert "channels_last+cuda_graph" in texts
    assert "offload(model)" in texts, "it moves the weights that a graph reads"
    assert "compile(mode=reduce-overhead)" in compiled("sdxl") or "compile(reduce-overhead)" in compiled(
        "sdxl"
    )


@pytest.mark.soak
def test_every_technique_goes_on_where_it_stopped(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_all_small(monkeypatch)
    monkeypatch.setattr(every_technique, "has_moved", lambda *_: None)  # a busy host is not what is tested
    (tmp_path / "record.json").write_bytes((measured / "record.json").read_bytes())
    again = [MODEL, *_paths(tmp_path), *QUICK, *_only([*RECIPES, "fuse_qkv"])]
    assert run(command, [*again, "--limit-s", "0"]) == MEASURED_IN_PART
    assert "the same command goes on with fuse_qkv" in capfd.readouterr().err
    assert run(command, again) == 0
    records = read_records(tmp_path / "record.json")
    assert [key_of(record)[0] for record in records][-2:] == ["baseline", "fuse_qkv"]
    before = (tmp_path / "record.json").read_bytes()
    assert run(command, again) == 0, "nothing is missing"
    assert (tmp_path / "record.json").read_bytes() == before


@pytest.mark.soak
def test_the_best_are_drawn_at_full_length(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_all_small(monkeypatch)
    monkeypatch.setattr(every_technique, "full_length", lambda name: 2)
    (tmp_path / "record.json").write_bytes((measured / "record.json").read_bytes())
    best = fastest(MODEL, read_records(measured / "record.json"), 1)
    assert best[0] in RECIPES
    assert run(command, [MODEL, *_paths(tmp_path), *QUICK, "--best", "1"]) == 0
    assert [key_of(record) for record in read_records(tmp_path / "record.json")][-2:] == [
        ("baseline", 2),
        (best[0], 2),
    ]


def test_a_named_recipe_at_its_own_length(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(command, [MODEL, *_paths(tmp_path), *QUICK, "--steps", "2"]) == 2
    assert "add --only RECIPE" in capfd.readouterr().err


def test_a_recipe_that_becomes_another_is_measured_once() -> None:
    assert cases("sd15", only=["fused(bf16)", "fused+cuda_graph"], steps=4) == [("fused+cuda_graph", 4)]


def test_what_was_timed_too_seldom_is_timed_again(measured: Path) -> None:
    beside, record, *_ = (_as_if_python_took(old, 1.0) for old in read_records(measured / "record.json"))
    beside = _as_slow_as(beside, 1.0, 1.0)
    assert num_timed(record) == 2
    assert finished(MODEL, [beside, record]) == [record], "eight steps are scaled, not full length"

    def whole(stored: Record) -> Record:
        workload = stored.trial.workload.model_copy(update={"num_inference_steps": full_length(MODEL)})
        return stored.model_copy(update={"trial": stored.trial.model_copy(update={"workload": workload})})

    assert finished(MODEL, [whole(beside), whole(record)]) == []
    rounds = tuple(round_.model_copy(update={"samples": round_.samples * 3}) for round_ in record.rounds)
    often = whole(record.model_copy(update={"rounds": rounds}))
    assert finished(MODEL, [whole(beside), often]) == [often]
    failed = rounds[0].model_copy(update={"samples": (), "outcome": Outcome.UNSUPPORTED, "reason": "so"})
    refused = whole(record.model_copy(update={"rounds": (failed,)}))
    assert is_done(MODEL, refused, None)


def _as_slow_as(record: Record, *seconds: float) -> Record:
    """The same record with a sample of so many seconds in each round."""
    rounds = tuple(
        round_.model_copy(update={"samples": (round_.samples[0].model_copy(update={"total_s": s}),)})
        for round_, s in zip(record.rounds, seconds, strict=True)
    )
    return record.model_copy(update={"rounds": rounds})


def test_rows_are_refused_if_the_host_changed(measured: Path) -> None:
    beside, record, *_ = (
        _as_if_python_took(stored, 1.0) for stored in read_records(measured / "record.json")
    )
    assert has_moved(_as_slow_as(beside, 1.0, 1.09), record) is None
    assert has_moved(_as_slow_as(beside, 1.0, 1.2), record) == "the baseline took 1 and 1.2 s"
    slow = _as_if_python_took(record, 3.0)
    assert "3.00 times as long" in str(has_moved(_as_slow_as(beside, 1.0, 1.0), slow))
    assert finished(MODEL, [_as_slow_as(beside, 1.0, 1.2), record]) == []


@pytest.mark.soak
def test_what_compiles_is_compiled_beside_each_other_into_a_record_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    limits = []

    def start(name: str, arguments: Sequence[str]) -> Any:
        limits.append(arguments[arguments.index("--timeout") + 1])
        return subprocess.Popen([sys.executable, "-c", SMALL, name, *arguments])

    monkeypatch.setattr(every_technique, "_start", start)
    recipes = ["inference_mode", "compile(backend=eager)", "fuse_qkv+compile(backend=eager)"]
    command_line = [MODEL, *_paths(tmp_path), "--device", "cpu", *_only(recipes), "--compile", "2"]
    command_line += ["--timeout", "250"]
    assert run(command, command_line) == 0
    assert limits == ["250", "250"]
    records = read_records(first_calls_file(tmp_path / "record.json"))
    assert sorted(record.trial.recipe.text for record in records) == sorted(recipes[1:])
    assert all(record.rounds[0].first_call_s for record in records)
    assert not (tmp_path / "record.json").exists()
    capfd.readouterr()
    assert run(command, command_line) == 0
    assert capfd.readouterr().out == "all compiled already\n"
    first_calls_file(tmp_path / "record.json").unlink()
    make_all_small(monkeypatch)
    monkeypatch.setattr(
        every_technique, "has_moved", lambda *_: None
    )  # on a busy machine a row would stay open
    assert run(command, [MODEL, *_paths(tmp_path), *QUICK, *_only(recipes[1:])]) == 0
    capfd.readouterr()
    assert run(command, command_line) == 0
    assert capfd.readouterr().out == "all compiled already\n", "what has been timed needs no more of it"


def _as_if_python_took(record: Record, ms: float) -> Record:
    """The same, with a CPU of that speed around it."""
    rounds = tuple(
        round_.model_copy(update={"conditions": round_.conditions | {"python_ms": ms, "python_after_ms": ms}})
        for round_ in record.rounds
    )
    return record.model_copy(update={"rounds": rounds})


def test_processes_that_measure_into_one_record_lose_nothing_of_each_other(
    measured: Path, tmp_path: Path
) -> None:
    """As on a machine of several GPUs, each of which has some of the recipes."""
    some = read_records(measured / "record.json")[1]
    recipes = [resolve(f"steps({number})").spec for number in range(2, 26)]
    news = [
        some.model_copy(update={"trial": some.trial.model_copy(update={"recipe": recipe})})
        for recipe in recipes
    ]
    path = tmp_path / "new" / "record.json"
    with ThreadPoolExecutor(8) as pool:
        contents = list(pool.map(lambda new: add(new, path), news))
    assert all(new in stored for stored, new in zip(contents, news, strict=True))
    assert {key_of(record)[0] for record in read_records(path)} == {recipe.text for recipe in recipes}
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]


def test_a_new_row_takes_the_place_of_the_old_with_its_baseline(measured: Path, tmp_path: Path) -> None:
    records = read_records(measured / "record.json")
    path = tmp_path / "record.json"
    write_records(path, records)
    beside, new = _as_if_python_took(records[0], 3.0), _as_if_python_took(records[1], 3.0)
    added = add_group(beside, [new], path)
    kept = [records[0], *records[2:]]  # the first baseline has another row
    assert added == read_records(path) == [*kept, beside, new]


def test_full_length_is_the_models_own() -> None:
    assert [full_length(name) for name in technique_cases.FAMILIES] == [50, 50, 28]


def test_rows_of_another_gpu_stand_beside_its_own_baseline(measured: Path, tmp_path: Path) -> None:
    first = read_records(measured / "record.json")
    path = tmp_path / "record.json"
    write_records(path, first)
    beside, new = (_as_if_on(record, "another GPU") for record in first[:2])
    beside = _as_if_python_took(beside, 3.0)
    records = add_group(beside, [new], path)
    assert new in records
    assert dict(technique_records.by_gpu(records))["another GPU"] == [beside, new]
    late = _as_if_on(first[1], first[0].environment.device_name)
    pairs = technique_records.with_baselines([first[0], beside, late])
    assert pairs[-1] == (late, first[0])


def test_a_record_of_one_gpu_refuses_another(measured: Path, tmp_path: Path) -> None:
    first = read_records(measured / "record.json")
    with pytest.raises(StoreError, match="give --record another file"):
        technique_records.check_device(first, _as_if_on(first[0], "another GPU"), tmp_path / "record.json")
    technique_records.check_device(first, first[1], tmp_path / "record.json")


def _as_if_on(record: Record, gpu: str) -> Record:
    there = record.environment.model_copy(update={"device_name": gpu})
    return record.model_copy(update={"environment": there})
