"""What is called the fastest known: chosen once, and the same on every page."""

from dataclasses import replace
from pathlib import Path

import pytest

from docs import fastest, readme
from docs.choosing import FULL_SIZE
from docs.fastest import Measurement, all_measurements, fastest_known
from vivace.evidence.tables import EvidenceRow, EvidenceTable
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.stats import Interval

ROOT = Path(__file__).parents[2]


def measured(recipe: str, seconds: float, **changes: object) -> Measurement:
    base = Measurement(
        model="sdxl",
        card="NVIDIA H200",
        height=1024,
        steps=50,
        recipe=recipe,
        latency=Interval(seconds, 0.99 * seconds, 1.01 * seconds),
        peak_bytes=12_400_000_000,
        gain=None if recipe == BASELINE else Interval(4 / seconds, 3.9 / seconds, 4.1 / seconds),
        reference=BASELINE,
        record="results/a.json",
    )
    return replace(base, **changes)


def table_below(page: str, heading: str) -> set[str]:
    """Return the rows of the table that follows a line, with links as from the repository's root."""
    lines = page.partition(heading)[2].lstrip().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| model |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(line.replace("(../results", "(results"))
    return set(rows)


def test_the_pages_name_the_same_recipes() -> None:
    every_model = table_below((ROOT / "docs" / "models-measured.md").read_text(), "## At a glance")
    choosing = table_below((ROOT / "docs" / "choosing.md").read_text(), "## The fastest known")
    start = table_below((ROOT / "README.md").read_text(), readme.FASTEST)

    def models(rows: set[str]) -> set[str]:
        return {row.split("|")[1].strip() for row in rows}

    assert choosing < every_model
    assert start < every_model
    assert models(start) == set(readme.MODELS)
    assert models(choosing) == {name for names in FULL_SIZE.values() for name in names}
    for rows in (start, choosing):
        assert rows == {row for row in every_model if models({row}) <= models(rows)}, "every card of a model"


def test_no_record_has_a_faster_row() -> None:
    """Each row is the shortest time of its model, card and steps, and names a record that exists."""
    everything = all_measurements()
    rows = fastest_known(everything)
    assert {"fused(fp8"} <= {row.best.recipe[:9] for row in rows if row.best.model == "flux-dev"}
    for row in rows:
        best = row.best
        assert (ROOT / best.record).exists()
        alike = [m for m in everything if (m.model, m.card, m.steps) == (best.model, best.card, best.steps)]
        kept = [m for m in alike if fastest._is_candidate(m) and m.recipe != best.recipe]
        own = {
            m.recipe: m.latency.point for m in reversed(kept)
        }  # a recipe counts as its first record has it
        assert all(best.latency.point <= seconds for seconds in own.values()), best


@pytest.mark.parametrize(
    ("change", "is_candidate"),
    [
        ({}, True),
        ({"recipe": "first_block_cache(hits=0.5)"}, False),
        ({"recipe": "parallel(cfg)"}, False),
        ({"recipe": "quantize(int8, backend=quanto)"}, False),
        ({"height": 512}, False),
        ({"steps": 8}, False),
    ],
    ids=["alone", "skips work", "several GPUs", "no longer exists", "another size", "fewer steps"],
)
def test_what_may_be_the_fastest(change: dict[str, object], is_candidate: bool) -> None:
    quick = replace(measured("compile", 1.0), **change)
    (row,) = fastest_known([measured(BASELINE, 4.0), measured("cuda_graph", 3.0), quick])
    assert row.best.recipe == (quick.recipe if is_candidate else "cuda_graph")
    assert row.baseline is not None
    assert row.baseline.latency.point == 4.0


def test_cards_have_rows_of_their_own_and_name_them() -> None:
    rows = fastest_known([measured("compile", 1.0), measured("compile", 2.0, card="NVIDIA H100")])
    assert [row.cells[1] for row in rows] == ["H200", "H100"]
    assert rows[0].cells[-1] == "[record](../results/a.json)"
    assert "(results/a.json)" in fastest.table(rows, top="")[-1]


def test_a_recipe_counts_once_as_its_first_record_has_it() -> None:
    again = measured("compile", 0.9, record="results/b.json")
    (row,) = fastest_known([measured("compile", 1.0), again, measured("cuda_graph", 0.95)])
    assert row.best.recipe == "cuda_graph"


def test_a_gain_says_what_it_is_over_and_whether_it_is_proven() -> None:
    def gain(**changes: object) -> tuple[str, str]:
        (row,) = fastest_known([measured(BASELINE, 4.0), measured("compile", 2.0, **changes)])
        return row.cells[5], row.cells[7]

    assert gain() == ("`compile`", "2.00x [1.95, 2.05]")
    assert gain(reference="cuda_graph")[1] == "2.00x [1.95, 2.05] over `cuda_graph`"
    apart = gain(gain=None)
    assert apart[1].startswith("2.00x [1.9")
    assert apart[1].endswith("] †")
    assert gain(gain=Interval(1.05, 0.98, 1.1))[0] == "not proven: `compile`"
    assert gain(gain=Interval(1.08, 1.06, 1.1), num_rounds=1)[0] == "not proven: `compile`"
    assert gain(gain=Interval(1.08, 1.06, 1.1), num_rounds=2)[0] == "`compile`"


def test_what_others_reported_counts_where_there_is_no_record() -> None:
    reported = {"is_reported": True, "record": "results/community/a.json"}
    own = [measured(BASELINE, 4.0), measured("compile", 3.0)]
    elsewhere = [
        measured(recipe, seconds, card="NVIDIA GeForce RTX 4090", **reported)
        for recipe, seconds in ((BASELINE, 6.0), ("compile", 5.0))
    ]
    faster = measured("compile", 1.0, **reported)
    lines = [each.cells for each in fastest_known([*own, faster, *elsewhere])]
    assert [(cells[1], cells[-1]) for cells in lines] == [
        ("H200", "[record](../results/a.json)"),
        ("GeForce RTX 4090", "[reported by others](../results/community/a.json)"),
    ]
    assert lines[0][5] == "`compile`"
    assert lines[0][6] == "3.00 s"


def test_the_tables_take_in_what_others_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    row = EvidenceRow(
        recipe="compile", num_techniques=1, same_picture=True, latency=Interval(5.0, None, None), num_rounds=2
    )
    table = EvidenceTable(
        kind="community",
        place="card.json",
        model="sdxl",
        random_weights=True,
        gpu="NVIDIA GeForce RTX 4090",
        height=1024,
        width=1024,
        steps=50,
        baseline=BASELINE,
        rows=(row,),
    )
    monkeypatch.setattr(fastest, "community_tables", lambda: (table,))
    (made,) = (each for each in all_measurements.__wrapped__() if each.is_reported)
    assert (made.card, made.record) == ("NVIDIA GeForce RTX 4090", "results/community/card.json")
