"""The script that measures every model: one record, resumed, stopped in time, held beside the plan."""

import shutil
from pathlib import Path

import pytest

from benchmarks.command import run
from benchmarks.every_model import every_model as command
from benchmarks.every_model import read_records
from tests.narrow import SIDE, make_all_small
from vivace.foundation.spec.record import Outcome

pytestmark = pytest.mark.long  # a script that measures, beside the package and not in it

RECIPES = ["--recipe", "baseline", "--recipe", "compile(backend=eager)"]
QUICK = ["--repeats", "1", "--warmup", "1", "--device", "cpu", *RECIPES]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the record of two small models, and the store that it came from."""
    folder = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patch:
        make_all_small(patch)
        for name in ("flux-schnell", "sd15"):
            assert run(command, [*_paths(folder), *QUICK, "--only", name]) == 0
    return folder


@pytest.fixture
def folder(measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it; models are small."""
    make_all_small(monkeypatch)
    shutil.copytree(measured, tmp_path / "copy")
    return tmp_path / "copy"


def _paths(folder: Path) -> list[str]:
    return ["--record", str(folder / "record.json"), "--store", str(folder / "store")]


@pytest.mark.soak
def test_the_record_holds_every_case_as_it_was_measured(measured: Path) -> None:
    records = read_records(measured / "record.json")
    assert [(model, recipe) for model, recipe in records] == [
        ("synthetic:flux-schnell", "baseline"),
        ("synthetic:flux-schnell", "compile(backend=eager)"),
        ("synthetic:sd15", "baseline"),
        ("synthetic:sd15", "compile(backend=eager)"),
    ]
    for record in records.values():
        assert record.outcome is Outcome.MEASURED
        assert record.trial.workload.height == SIDE, "the entry's own size"
        assert record.trial.workload.text == "prompts"
        assert len(record.rounds[0].samples) == 1
        assert record.rounds[0].load_s
    assert records["synthetic:flux-schnell", "baseline"].trial.workload.guidance_scale == 0


@pytest.mark.soak
def test_what_is_in_the_record_is_not_measured_again(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = (folder / "record.json").read_bytes()
    shutil.rmtree(folder / "store")
    assert run(command, [*_paths(folder), *QUICK, "--only", "sd15", "--only", "flux-schnell"]) == 0
    out = capfd.readouterr().out.splitlines()
    assert out == ["synthetic:sd15: in the record already", "synthetic:flux-schnell: in the record already"]
    assert (folder / "record.json").read_bytes() == before
    assert not (folder / "store").exists(), "no process was asked for anything"
