"""The script that measures every technique on one model: resumed, compared with the right baseline, compiled ahead."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks import every_technique, technique_cases
from benchmarks.command import run
from benchmarks.every_technique import every_technique as command
from benchmarks.every_technique import finished, has_moved
from benchmarks.technique_cases import (
    ALONE,
    COMPILED,
    alone,
    compiled,
)
from benchmarks.technique_records import add, key_of, read_records
from tests.narrow import make_all_small
from vivace.foundation.spec.record import Record
from vivace.recipes.resolve import resolve
from vivace.techniques import TECHNIQUES

pytestmark = pytest.mark.long  # a script that measures, beside the package and not in it

QUICK = ["--repeats", "1", "--warmup", "1", "--device", "cpu"]
RECIPES = ["inference_mode", "vae_slicing", "compile(backend=eager)"]
MODEL = "flux-dev"
"""Its baseline runs on a CPU; that of the UNets, `cuda_graph`, does not."""


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
