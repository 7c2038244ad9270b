"""The script that measures speed-up against fidelity: counted work, resumed, figures kept beside the record."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.command import MEASURED_IN_PART, run
from benchmarks.step_cases import read_cases, rows_with_quality
from benchmarks.step_curves import CURVES, STEPS
from benchmarks.step_curves import step_curves as command
from vivace.architectures import CATALOGUE
from vivace.benchmark.cache_calibration import CACHES
from vivace.foundation.spec.record import Outcome
from vivace.recipes.resolve import resolve

pytestmark = pytest.mark.long  # a script that measures, beside the package and not in it

QUICK = ["--prompts", "2", "--repeats", "1", "--device", "cpu"]
STEPS_HERE = 8
RECIPES = ["steps(2)", "cfg_cutoff(0.5)"]


def _arguments(folder: Path, recipes: list[str]) -> list[str]:
    only = [word for recipe in recipes for word in ("--only", recipe)]
    return ["--record", str(folder / "record.json"), "--store", str(folder / "store"), *QUICK, *only]


@pytest.fixture(scope="module", autouse=True)
def _few_steps() -> Iterator[None]:
    """The models' own numbers are for images that are looked at."""
    with pytest.MonkeyPatch.context() as patch:
        for name in CURVES:
            entry = CATALOGUE[name].model_copy(update={"num_inference_steps": STEPS_HERE})
            patch.setitem(CATALOGUE, name, entry)
        yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    assert run(command, ["tiny-sd", *_arguments(folder, RECIPES)]) == 0
    return folder


def test_every_step_cache_has_a_curve_on_a_model_that_takes_it() -> None:
    drawn = {
        call.name
        for of in CURVES.values()
        for texts in of.values()
        for t in texts
        for call in resolve(t).techniques
    }
    assert set(CACHES) <= drawn
    assert {"steps", "cfg_cutoff", "prune"} <= drawn
    for curves in CURVES.values():
        assert len(curves[STEPS]) >= 8
        for name in curves:
            if name.partition(",")[0] in CACHES:
                assert len({resolve(text).text for text in curves[name]}) >= 4, name


@pytest.mark.soak
def test_each_recipe_has_its_work_and_its_figures(measured: Path) -> None:
    cases = read_cases(measured / "record.json")
    assert list(cases) == ["baseline", *RECIPES]
    assert [case.record.outcome for case in cases.values()] == [Outcome.MEASURED] * 3
    assert cases["baseline"].work == 1.0
    assert cases["steps(2)"].work == pytest.approx(2 / 8)
    # Four steps with both branches, four with one.
    assert cases["cfg_cutoff(0.5)"].work == pytest.approx((4 + 4 / 2) / 8)
    rows = rows_with_quality(cases)
    few, cut = rows["steps(2)"].fidelity, rows["cfg_cutoff(0.5)"].fidelity
    assert few is not None
    assert cut is not None
    assert few.num_pictures == cut.num_pictures == 2
    assert few.ssim is not None
    assert cut.ssim is not None
    assert few.ssim.point < cut.ssim.point < 1
    assert few.clip_kept is not None
    assert rows["steps(2)"].speedup is not None


@pytest.mark.soak
def test_step_curves_go_on_where_they_stopped(
    measured: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "record.json").write_bytes((measured / "record.json").read_bytes())
    again = ["tiny-sd", *_arguments(tmp_path, [*RECIPES, "steps(3)"])]
    assert run(command, [*again, "--limit-s", "0"]) == MEASURED_IN_PART
    assert "the same command goes on with steps(3)" in capfd.readouterr().err
    before = (tmp_path / "record.json").read_bytes()
    assert run(command, ["tiny-sd", *_arguments(tmp_path, RECIPES)]) == 0
    assert capfd.readouterr().out == "all in the record already\n"
    assert (tmp_path / "record.json").read_bytes() == before
