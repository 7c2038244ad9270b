import json

from tinyworld import evaluate, table


def test_the_page_says_what_the_record_says():
    page = table.PAGE.read_text()
    assert table.filled(page, json.loads(table.RECORD.read_text())) == page, "run python -m tinyworld.table"


def test_every_gate_is_in_the_record_and_holds():
    record = json.loads(table.RECORD.read_text())
    assert record["captions"] == 500
    wanted = {
        (model, figure): least for model, row in evaluate.GATES.items() for figure, least in row.items()
    }
    assert {(gate["model"], gate["figure"]): gate["least"] for gate in record["gates"]} == wanted
    assert record["gates"] == evaluate.gates(record["round_trips"], record["default"])
    assert all(gate["passed"] for gate in record["gates"])


def test_the_page_gives_the_folders_true_sizes():
    page = table.PAGE.read_text()
    for folder in evaluate.WEIGHTS.glob("tiny-sd*"):
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        assert f"`{folder.name}`" in page
        assert f"{size:,}" in page, f"{folder.name} has {size:,} bytes"
