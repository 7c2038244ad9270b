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
    recipes,
    skipping,
)
from benchmarks.skipped_work import skipped_work as command
from benchmarks.technique_cases import baseline
from benchmarks.technique_records import read_records, rows_with_baselines
from docgen import choosing
from docgen import skipped_work as skipped_work_page
from docgen.skipped_work import page, skipping_of
from tests.narrow import make_all_small
from vivace.foundation.spec.record import Outcome
from vivace.foundation.stats import Interval
from vivace.machinery.technique import Stage
from vivace.recipes.resolve import resolve
from vivace.techniques import TECHNIQUES

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


def test_every_cache_is_asked_for_where_it_runs() -> None:
    names = {call.name for name in FAMILIES for text in recipes(name) for call in resolve(text).techniques}
    assert {
        name for name, t in TECHNIQUES.items() if t.declared.stage is Stage.CACHE and "hits" in t.model_fields
    } <= names
    assert {"steps", "cfg_cutoff"} <= names
    assert "steps" not in {resolve(text).techniques[0].name for text in recipes("flux-schnell")}


def test_steps_of_unets_are_recorded_in_the_baseline_too() -> None:
    for name in ("sdxl", "sd15"):
        assert baseline(name) == "cuda_graph"
        among = resolve("cuda_graph").spec
        assert all("cuda_graph" in text.split("+") for text in recipes(name))
        assert {skipping(resolve(text).spec, among).name for text in recipes(name)} == {
            "steps", "deepcache", "faster_cache", "cfg_cutoff", "guidance",
        }  # fmt: skip
    for name in ("flux-dev", "flux-schnell"):
        assert baseline(name) == "baseline"
        assert not any("cuda_graph" in text for text in recipes(name))
    assert recipe_of("sdxl", "steps(20)") == recipe_of("sdxl", "cuda_graph+steps(20)")
    assert recipe_of("sdxl", "deepcache+compile") == resolve("deepcache+compile+cuda_graph").text
    assert recipe_of("flux-dev", "fbcache(hits=0.5)") == "first_block_cache(hits=0.5)"


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


def test_a_block_of_flux_is_one_of_57() -> None:
    """first_block_cache computes the first of 19 double blocks, which are larger than the 38 single ones."""
    operations = read_operations()["flux-dev"]["first_block_cache"]
    assert 1 / 57 < operations.hit / operations.step < 2 / 57


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


@pytest.mark.soak
def test_overhead_is_what_a_hit_takes_beyond_its_operations(measured: Path) -> None:
    whole, _, cache, _, _ = rows_with_baselines(read_records(measured / "skipped-work-sd15.json"), BESIDE)

    def overhead(hit: int) -> float:
        skipped = skipping_of(cache, whole, {"deepcache": Operations(100, hit)})
        assert skipped is not None
        assert skipped.overhead is not None
        return skipped.overhead.point

    assert overhead(0) - overhead(30) == pytest.approx(0.3)


@pytest.mark.soak
def test_the_page(measured: Path) -> None:
    text = page("note\n", measured)
    assert "## sd15" in text
    assert f"Speed-up, ideal and overhead are against `{BESIDE}`." in text
    (first, *others) = [line for line in text.splitlines() if line.startswith("| `")]
    assert first.startswith(f"| `{BESIDE}` |")
    assert "| 1 | - | - | - | a step: " in first
    assert sorted(line.split("`")[1] for line in others) == sorted(
        recipe_of("sd15", text) for text in RECIPES
    )
    assert "Overhead of a skipped step: " in text
    assert "Half the batch is half the work but takes " in text
    assert "Still to be measured: `channels_last+deepcache(hits=0.3)`" in text
    assert "\nStill to be measured: flux-dev, flux-schnell, sdxl." in text


@pytest.mark.soak
def test_the_choosing_page_reads_it(measured: Path, tmp_path: Path) -> None:
    (line,) = choosing._on_full_size("sd15", measured)
    assert f"against `{BESIDE}`), half of the steps skipped, measured of ideal: " in line
    assert "steps(3)" not in line
    for text in RECIPES[1:3]:
        assert f"`{recipe_of('sd15', text)}` " in line
    assert choosing._on_full_size("sd15", tmp_path) == [], "nothing measured, nothing told"


@pytest.mark.soak
def test_skipped_work_goes_on_where_it_stopped(measured: Path, capfd: pytest.CaptureFixture[str]) -> None:
    record = measured / "skipped-work-sd15.json"
    before = record.read_text()
    only = [word for recipe in RECIPES for word in ("--only", recipe)]
    assert run(command, ["sd15", "--record", str(record), *only, "--device", "cpu"]) == 0
    assert "all measured already" in capfd.readouterr().out
    assert record.read_text() == before


def test_the_interval_of_an_overhead_is_that_of_the_steps() -> None:
    """Half of the steps compute a fifth, so 60 % of the time would be left; it took 65 % [62, 68]."""
    interval = skipped_work_page._overhead(Interval(0.65, 0.62, 0.68), left=0.6, skipped=0.5)
    assert (interval.point, interval.low, interval.high) == pytest.approx((0.1, 0.04, 0.16))
    assert skipped_work_page._overhead_text(interval) == "10.0% [4.0, 16.0]"
    assert skipped_work_page._overhead_text(Interval(0.1, 0.06, 0.14)) == "**10.0% [6.0, 14.0]**"
    assert skipped_work_page._overhead_text(Interval(0.1, None, None)) == "10.0%"


def test_committed_overheads_have_intervals() -> None:
    rows = rows_with_baselines(read_records(skipped_work.record_file("sdxl")), baseline("sdxl"))
    counted = read_operations()["sdxl"]
    skipped_rows = [
        entry for row in rows[1:] if row.latency and (entry := skipping_of(row, rows[0], counted))
    ]
    overheads = [entry.overhead for entry in skipped_rows if entry.overhead is not None]
    assert len(overheads) > 5
    for entry in overheads:
        assert entry.low is not None
        assert entry.high is not None
        assert entry.low < entry.point < entry.high
