import json

import pytest

from tinyworld import evaluate, evaluate_flux, evaluate_lcm, plot, table

RECORDS = (
    (table.RECORD, table.TABLES, evaluate.GATES),
    (table.FLUX_RECORD, table.FLUX_TABLES, evaluate_flux.GATES),
)


@pytest.mark.parametrize(
    ("path", "tables"),
    [*(record[:2] for record in RECORDS), (table.LCM_RECORD, table.LCM_TABLES)],
    ids=["sd", "flux", "lcm"],
)
def test_the_page_says_what_the_record_says(path, tables):
    page = table.PAGE.read_text()
    assert table.filled(page, json.loads(path.read_text()), tables) == page, "run python -m tinyworld.table"


@pytest.mark.parametrize(("path", "gates"), [(path, gates) for path, _, gates in RECORDS], ids=["sd", "flux"])
def test_every_gate_is_in_the_record_and_holds(path, gates):
    record = json.loads(path.read_text())
    assert record["captions"] == 500
    expected = {(model, figure): least for model, row in gates.items() for figure, least in row.items()}
    assert {(gate["model"], gate["figure"]): gate["least"] for gate in record["gates"]} == expected
    assert all(gate["passed"] for gate in record["gates"])


def test_gates_are_judged_by_what_was_measured():
    record = json.loads(table.RECORD.read_text())
    assert record["gates"] == evaluate.gates(record["round_trips"], record["default"])
    record = json.loads(table.FLUX_RECORD.read_text())
    assert record["gates"] == evaluate_flux.gates(record)


def test_the_lora_is_worth_its_bytes():
    """By the record: clearly better than plain steps, as many or of the same work, and than its sampler without it."""
    record = json.loads(table.LCM_RECORD.read_text())
    assert record["captions"] >= 300
    assert record["training"] == evaluate_lcm.facts_of(evaluate_lcm.SHIPPED)
    rows = {(row["what"], row["steps"]): row["accuracies"]["everything"] for row in record["rows"]}
    assert set(rows) == {(row.what, row.steps) for row in evaluate_lcm.ROWS}
    for steps, what, rival in (
        (4, evaluate_lcm.PLAIN, 4),
        (4, evaluate_lcm.PLAIN, 2),
        (2, evaluate_lcm.PLAIN, 2),
        (2, evaluate_lcm.SAMPLER, 2),
    ):
        low, _ = table.wilson_interval(**_counts(rows[evaluate_lcm.LORA, steps]))
        assert low > table.wilson_interval(**_counts(rows[what, rival]))[1], (steps, what, rival)
    assert rows[evaluate_lcm.LORA, 4]["accuracy"] > rows[evaluate_lcm.SAMPLER, 4]["accuracy"]


def _counts(figure):
    return {"right": figure["right"], "total": figure["asked"]}


def test_an_interval_of_a_share():
    low, high = table.wilson_interval(45, 50)  # by hand: Wilson's, 0.786 to 0.957
    assert (round(low, 3), round(high, 3)) == (0.786, 0.957)
    low, high = table.wilson_interval(50, 50)
    assert 0.9 < low < high <= 1.0 + 1e-12


def test_a_cache_reuses_more_and_keeps_less_as_its_threshold_rises():
    record = json.loads(table.FLUX_RECORD.read_text())
    rows = record["cache"]
    hits = [row["hit_rate"] for row in rows]
    assert hits == sorted(hits)
    assert hits[-1] > 0.8
    decibels = [row["psnr_db"] or float("inf") for row in rows]
    assert decibels == sorted(decibels, reverse=True)
    assert decibels[-1] < 20
    drawn = plot.cache_plot(record)
    assert table.CACHE_PLOT.read_text() == drawn, "run python -m tinyworld.table"
    assert drawn.count("<circle") == 2 * len(rows) - sum(row["psnr_db"] is None for row in rows)


def test_the_page_gives_the_folders_true_sizes():
    page = table.PAGE.read_text()
    for folder in evaluate.WEIGHTS.glob("tiny-*"):
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        assert f"`{folder.name}`" in page
        assert f"{size:,}" in page, f"{folder.name} has {size:,} bytes"
