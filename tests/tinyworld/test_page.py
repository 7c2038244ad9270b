import json

import pytest

from tinyworld import evaluate, evaluate_flux, plot, table

RECORDS = (
    (table.RECORD, table.TABLES, evaluate.GATES),
    (table.FLUX_RECORD, table.FLUX_TABLES, evaluate_flux.GATES),
)


@pytest.mark.parametrize(("path", "tables"), [record[:2] for record in RECORDS], ids=["sd", "flux"])
def test_the_page_says_what_the_record_says(path, tables):
    page = table.PAGE.read_text()
    assert table.filled(page, json.loads(path.read_text()), tables) == page, "run python -m tinyworld.table"


@pytest.mark.parametrize(("path", "gates"), [(path, gates) for path, _, gates in RECORDS], ids=["sd", "flux"])
def test_every_gate_is_in_the_record_and_holds(path, gates):
    record = json.loads(path.read_text())
    assert record["captions"] == 500
    wanted = {(model, figure): least for model, row in gates.items() for figure, least in row.items()}
    assert {(gate["model"], gate["figure"]): gate["least"] for gate in record["gates"]} == wanted
    assert all(gate["passed"] for gate in record["gates"])


def test_gates_are_judged_by_what_was_measured():
    record = json.loads(table.RECORD.read_text())
    assert record["gates"] == evaluate.gates(record["round_trips"], record["default"])
    record = json.loads(table.FLUX_RECORD.read_text())
    assert record["gates"] == evaluate_flux.gates(record)


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
