"""The script that measures every technique on one model: resumed, compared with the right baseline, compiled ahead."""

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks import every_technique
from benchmarks.command import run
from benchmarks.every_model import write_records
from benchmarks.every_technique import (
    ALONE,
    COMPILED,
    add,
    alone,
    compiled,
    configurations,
    disturbed,
    fastest,
    first_calls_file,
    full_length,
    is_done,
    key_of,
    num_timed,
    read_records,
    row_of,
    rows_with_baselines,
)
from benchmarks.every_technique import every_technique as command
from tests.narrow import make_all_small
from vivace.errors import StoreError
from vivace.recipes.resolve import resolve
from vivace.spec.record import Outcome, Record
from vivace.techniques import TECHNIQUES

pytestmark = pytest.mark.long  # a script that measures, beside the package and not in it

QUICK = ["--repeats", "1", "--warmup", "1", "--device", "cpu"]
ASKED = ["inference_mode", "vae_slicing", "compile(backend=eager)"]
SMALL = """
import sys, pytest
from benchmarks.command import run
from benchmarks.every_model import write_records
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
        assert run(command, ["sd15", *_paths(folder), *QUICK, *_only(ASKED)]) == 0
    return folder


def test_no_technique_of_the_same_picture_is_left_out() -> None:
    everything = (*ALONE, *COMPILED)
    asked = {call.name for text in everything for call in resolve(text).techniques}
    # Several GPUs are benchmarks.several_gpus' to measure, fused kernels benchmarks.flux_fused's.
    assert {t.name for t in TECHNIQUES.values() if t.same_picture} - {"parallel", "fused"} <= asked
    for name in every_technique.FAMILIES:
        assert all("compile" in text for text in compiled(name))
        texts = [*alone(name), *compiled(name)]
        assert len(set(texts)) == len(everything) + 1, "half of its denoiser kept on the GPU"


def test_the_study_has_ten_configurations_on_every_model() -> None:
    for name in every_technique.FAMILIES:
        found = configurations(name)
        assert len(set(found)) == 9, "and the baseline"
    assert "quantize(int8)@denoiser,text_encoder_2,vae" in {
        part for text in configurations("flux-dev") for part in text.split("+")
    }
    assert all("text_encoder_2" not in text for text in configurations("sd15"))


def test_every_recipe_follows_its_baseline(measured: Path) -> None:
    records = read_records(measured / "record.json")
    assert [key_of(one) for one in records] == [(text, 8) for text in ("baseline", *ASKED)]
    assert [one.outcome for one in records] == [
        Outcome.MEASURED, Outcome.MEASURED, Outcome.NO_EFFECT, Outcome.MEASURED,
    ], [one.reason for one in records]  # fmt: skip
    rows = rows_with_baselines(records)
    assert [row.is_baseline for row in rows] == [True, False, False, False]
    assert rows[1].speedup is not None
    assert rows[3].record.rounds[0].evidence["compiled_graphs"]


def test_it_goes_on_where_it_stopped_with_a_baseline_of_that_day(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_all_small(monkeypatch)
    (tmp_path / "record.json").write_bytes((measured / "record.json").read_bytes())
    again = ["sd15", *_paths(tmp_path), *QUICK, *_only([*ASKED, "fuse_qkv"])]
    assert run(command, [*again, "--limit-s", "0"]) == every_technique.MEASURED_IN_PART
    assert "the same command goes on with baseline" in capfd.readouterr().err
    assert run(command, again) == 0
    records = read_records(tmp_path / "record.json")
    assert [one.trial.recipe.text for one in records] == ["baseline", *ASKED, "baseline", "fuse_qkv"]
    baseline, fused = records[-2:]
    ratio = rows_with_baselines(records)[-1].speedup
    assert ratio is not None
    assert ratio.point == pytest.approx(
        baseline.rounds[0].samples[0].total_s / fused.rounds[0].samples[0].total_s
    )
    before = (tmp_path / "record.json").read_bytes()
    assert run(command, again) == 0, "nothing is missing"
    assert (tmp_path / "record.json").read_bytes() == before


def test_the_best_are_drawn_at_full_length(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_all_small(monkeypatch)
    monkeypatch.setattr(every_technique, "full_length", lambda name: 2)
    (tmp_path / "record.json").write_bytes((measured / "record.json").read_bytes())
    best = fastest(read_records(measured / "record.json"), 1)
    assert best[0] in ASKED
    best_one = ["sd15", *_paths(tmp_path), *QUICK, "--best", "1"]
    assert run(command, best_one) == 2
    assert "fewer than 3 timed calls there is no interval" in capfd.readouterr().err
    assert len(read_records(tmp_path / "record.json")) == 4, "nothing was measured"
    assert run(command, [*best_one, "--repeats", "3"]) == 0
    assert [key_of(one) for one in read_records(tmp_path / "record.json")][4:] == [
        ("baseline", 2),
        (best[0], 2),
    ]


def test_a_named_recipe_at_full_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_all_small(monkeypatch)
    monkeypatch.setattr(every_technique, "full_length", lambda name: 2)
    asked = ["sd15", *_paths(tmp_path), *QUICK, "--only", "fuse_qkv"]
    assert run(command, [*asked, "--steps", "3"]) == 0, "of other lengths one call is taken"
    assert run(command, [*asked, "--steps", "2", "--repeats", "3"]) == 0
    found = read_records(tmp_path / "record.json")
    assert [(*key_of(one), num_timed(one)) for one in found] == [
        ("baseline", 3, 1), ("fuse_qkv", 3, 1), ("baseline", 2, 3), ("fuse_qkv", 2, 3),
    ]  # fmt: skip
    assert run(command, ["sd15", *_paths(tmp_path), *QUICK, "--steps", "2"]) == 2
    assert "add --only RECIPE" in capfd.readouterr().err


def test_what_was_timed_too_seldom_is_timed_again(measured: Path) -> None:
    record = read_records(measured / "record.json")[1]
    assert num_timed(record) == 1
    assert is_done("sd15", record), "eight steps are scaled, not full length"
    workload = record.trial.workload.model_copy(update={"num_inference_steps": full_length("sd15")})
    whole = record.model_copy(update={"trial": record.trial.model_copy(update={"workload": workload})})
    assert not is_done("sd15", whole)
    (round_,) = whole.rounds
    often = round_.model_copy(update={"samples": round_.samples * 3})
    assert is_done("sd15", whole.model_copy(update={"rounds": (often,)}))
    failed = round_.model_copy(update={"samples": (), "outcome": Outcome.UNSUPPORTED, "reason": "so"})
    assert is_done("sd15", whole.model_copy(update={"rounds": (failed,)}))


def test_what_compiles_is_compiled_beside_each_other_into_a_record_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    limits = []

    def start(name: str, arguments: Sequence[str]) -> Any:
        limits.append(arguments[arguments.index("--timeout") + 1])
        return subprocess.Popen([sys.executable, "-c", SMALL, name, *arguments])

    monkeypatch.setattr(every_technique, "_start", start)
    recipes = ["inference_mode", "compile(backend=eager)", "fuse_qkv+compile(backend=eager)"]
    asked = ["sd15", *_paths(tmp_path), "--device", "cpu", *_only(recipes), "--compile", "2"]
    asked += ["--timeout", "250"]
    assert run(command, asked) == 0
    assert limits == ["250", "250"]
    found = read_records(first_calls_file(tmp_path / "record.json"))
    assert sorted(one.trial.recipe.text for one in found) == sorted(recipes[1:])
    assert all(one.rounds[0].first_call_s for one in found)
    assert not (tmp_path / "record.json").exists()
    capfd.readouterr()
    assert run(command, asked) == 0
    assert capfd.readouterr().out == "all compiled already\n"
    first_calls_file(tmp_path / "record.json").unlink()
    make_all_small(monkeypatch)
    assert run(command, ["sd15", *_paths(tmp_path), *QUICK, *_only(recipes[1:])]) == 0
    capfd.readouterr()
    assert run(command, asked) == 0
    assert capfd.readouterr().out == "all compiled already\n", "what has been timed needs no more of it"


def _as_if_python_took(record: Record, ms: float) -> Record:
    """The same, with a CPU of that speed around it."""
    rounds = tuple(
        one.model_copy(update={"conditions": one.conditions | {"python_ms": ms, "python_after_ms": ms}})
        for one in record.rounds
    )
    return record.model_copy(update={"rounds": rounds})


def test_what_the_cpu_spoilt_is_measured_again_right_behind_a_baseline(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    records = read_records(measured / "record.json")
    slow = [_as_if_python_took(one, 3.0 if key_of(one)[0] == "inference_mode" else 1.0) for one in records]
    assert disturbed(slow) == [("inference_mode", 8)]
    assert disturbed([_as_if_python_took(one, 1.0) for one in records]) == []
    write_records(tmp_path / "record.json", slow)

    def measure(name: str, recipe: str, steps: int, how: Any, launcher: Any) -> Any:
        (found,) = [one for one in records if key_of(one) == (recipe, steps)]
        return _as_if_python_took(found, 3.0)  # the CPU is slow now, for both

    monkeypatch.setattr(every_technique, "measure", measure)
    assert run(command, ["sd15", *_paths(tmp_path), *QUICK, "--careful"]) == 0
    found = read_records(tmp_path / "record.json")
    assert [key_of(one)[0] for one in found] == ["baseline", *ASKED[1:], "baseline", "inference_mode"]
    assert disturbed(found) == []
    capfd.readouterr()
    assert run(command, ["sd15", *_paths(tmp_path), *QUICK, "--careful"]) == 0
    assert capfd.readouterr().out == "", "nothing is left to do"


def test_processes_that_measure_into_one_record_lose_nothing_of_each_other(
    measured: Path, tmp_path: Path
) -> None:
    """As on a machine of several GPUs, each of which has some of the recipes."""
    some = read_records(measured / "record.json")[1]
    recipes = [resolve(f"steps({number})").spec for number in range(2, 26)]
    news = [
        some.model_copy(update={"trial": some.trial.model_copy(update={"recipe": one})}) for one in recipes
    ]
    path = tmp_path / "new" / "record.json"
    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(lambda new: add(new, path), news))
    assert all(new in found for found, new in zip(told, news, strict=True))
    assert {key_of(one)[0] for one in read_records(path)} == {one.text for one in recipes}
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]


def test_a_row_stays_with_the_baseline_of_its_own_process(measured: Path, tmp_path: Path) -> None:
    baseline, some, *_ = read_records(measured / "record.json")
    path = tmp_path / "record.json"
    ones, others = _as_if_python_took(baseline, 1.0), _as_if_python_took(baseline, 3.0)
    mine, theirs = _as_if_python_took(some, 1.0), _as_if_python_took(_named(some, "steps(9)"), 3.0)
    add(ones, path)
    add(others, path, behind=None)
    add(theirs, path, behind=others)
    found = add(mine, path, behind=ones)
    assert found == read_records(path) == [ones, mine, others, theirs]
    assert row_of(mine, found).cpu_ratio == 1.0
    assert disturbed(found) == []


def _named(record: Record, recipe: str) -> Record:
    return record.model_copy(
        update={"trial": record.trial.model_copy(update={"recipe": resolve(recipe).spec})}
    )


@pytest.mark.parametrize(
    "other", [["--only", "tf32"], ["--best", "2"], ["--compile", "2"], ["--no-baseline"]]
)
def test_careful_goes_alone(other: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(command, ["sd15", *_paths(tmp_path), *QUICK, "--careful", *other]) == 2
    assert "leave out --only, --best, --compile and --no-baseline" in " ".join(capfd.readouterr().err.split())


def test_full_length_is_the_models_own() -> None:
    assert [full_length(name) for name in every_technique.FAMILIES] == [50, 50, 28]


def test_another_machine_wants_another_file(
    measured: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (measured / "record.json").read_text()
    other = tmp_path / "record.json"
    other.write_text(text)
    records = read_records(other)
    moved = records[0].model_copy(
        update={"environment": records[0].environment.model_copy(update={"device_name": "another GPU"})}
    )
    with pytest.raises(StoreError, match="give --record another file"):
        add(moved, other)
    assert other.read_text() == text
