"""What skipping saves beside what it would save for nothing: counted, measured on small models, and on the page."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import skipped_work, technique_cases
from benchmarks.command import run
from benchmarks.skipped_work import (
    FAMILIES,
    Operations,
    caches,
    count_operations,
    read_operations,
    recipe_of,
)
from benchmarks.skipped_work import skipped_work as command
from benchmarks.technique_records import read_records, rows_with_baselines
from docgen.skipped_work import skipping_of
from tests.narrow import make_all_small
from vivace.foundation.spec.record import Outcome

pytestmark = pytest.mark.long  # a script that measures, beside the package and not in it

BESIDE = "channels_last"
RECIPES = ["steps(3)", "deepcache(hits=0.5)", "cfg_cutoff(0.5)", "guidance(1)"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("skipped")
    with pytest.MonkeyPatch.context() as patch:
        make_all_small(patch)
        # In the place of what only a GPU can record.
        patch.setitem(technique_cases.COMMON, "sd15", BESIDE)
        patch.setattr(skipped_work, "full_length", lambda name: 8)
        only = [word for recipe in RECIPES for word in ("--only", recipe)]
        paths = ["--record", str(folder / "skipped-work-sd15.json"), "--store", str(folder / "store")]
        assert run(command, ["sd15", *paths, *only, "--repeats", "2", "--device", "cpu"]) == 0
        yield folder


def test_the_counts_are_committed_for_every_recipe() -> None:
    counted = read_operations()
    for name in FAMILIES:
        assert set(caches(name)) <= set(counted[name])
        for operations in counted[name].values():
            assert 0 <= operations.hit < operations.step


@pytest.mark.parametrize(
    ("name", "technique"),
    [("sd15", "deepcache"), ("sd15", "cfg_cutoff"), ("flux-schnell", "first_block_cache")],
)
@pytest.mark.soak
def test_the_committed_counts_are_what_is_counted(name: str, technique: str) -> None:
    knobs = "0.5" if technique == "cfg_cutoff" else "hits=0.5"
    assert count_operations(name, f"{technique}({knobs})") == read_operations()[name][technique]


@pytest.mark.soak
def test_skipping_beside_its_ideal(measured: Path) -> None:
    records = read_records(measured / "skipped-work-sd15.json")
    assert [each.outcome for each in records] == [Outcome.MEASURED] * 5, [each.reason for each in records]
    whole, fewer, cache, cutoff, unguided = rows_with_baselines(records, BESIDE)
    assert whole.is_baseline
    assert whole.recipe == BESIDE
    assert [row.recipe for row in (fewer, cache, cutoff, unguided)] == [
        recipe_of("sd15", text) for text in RECIPES
    ]
    half = Operations(100, 50)
    operations = {"deepcache": Operations(100, 10), "cfg_cutoff": half, "guidance": half}
    skippings = [skipping_of(row, whole, operations) for row in (fewer, cache, cutoff, unguided)]
    assert all(skippings)
    # SD 1.5's scheduler calls the denoiser once more than there are steps.
    assert [entry.skipped for entry in skippings if entry] == [5 / 8, 4 / 9, 5 / 9, 1.0]
    assert [entry.computes for entry in skippings if entry] == [None, 0.1, 0.5, 0.5]
    assert skippings[0] is not None
    assert skippings[0].overhead is None
    for entry in skippings:
        assert entry is not None
        assert 1 < entry.ideal < 8 / 3
    assert skipping_of(cache, whole, {}) is None, "what was not counted has no ideal"
