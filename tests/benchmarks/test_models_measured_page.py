"""The page of all models, made of a record: figures where there are some, reasons where there are none."""

from pathlib import Path

import pytest

from benchmarks import every_model
from benchmarks.record_files import write_records
from docgen import generate, models_measured
from tests.make import make_record, make_round
from vivace.foundation.spec.record import Outcome, Record, Round
from vivace.models.find import find_model


def case(name: str, recipe: str, *rounds: Round) -> Record:
    record = make_record(recipe, *rounds)
    located = find_model(f"synthetic:{name}")
    workload = record.trial.workload.model_copy(update=located.defaults)
    trial = record.trial.model_copy(update={"model": located.model, "workload": workload, "device": "cuda"})
    environment = record.environment.model_copy(update={"device": "cuda", "device_name": "Test GPU"})
    return record.model_copy(update={"trial": trial, "environment": environment})


@pytest.fixture
def record(tmp_path: Path) -> Path:
    fast = make_round(0, (0.5, 0.51, 0.49))
    failed = make_round(0, outcome=Outcome.OUT_OF_MEMORY, reason="the allocation failed")
    cases = [
        case("flux-dev", "baseline", make_round(0)),
        case("flux-dev", "compile", failed),
        case("sdxl", "compile", fast),
        case("sdxl", "baseline", make_round(0)),
        case("sdxl-turbo", "baseline", fast.model_copy(update={"steady": False})),
    ]
    path = tmp_path / "every-model.json"
    write_records(path, cases)
    return path


def tables_in(page: str) -> dict[str, list[list[str]]]:
    """Return the lines of each table, its headings first, by the heading above it."""
    tables: dict[str, list[list[str]]] = {}
    for line in page.splitlines():
        if line.startswith("## "):
            above = line.removeprefix("## ")
        elif line.startswith("|") and not line.startswith("| ---"):
            tables.setdefault(above, []).append([cell.strip() for cell in line.strip("|").split("|")])
    return tables


def rows_in(page: str) -> list[list[str]]:
    """Return the headings of the tables of all measurements, and then their rows."""
    tables = [rows for above, rows in tables_in(page).items() if above in models_measured._PURPOSES]
    assert len({tuple(rows[0]) for rows in tables}) == 1
    return [tables[0][0], *(row for rows in tables for row in rows[1:])]


def test_every_case_has_a_row_with_its_figures_or_its_reason(record: Path) -> None:
    page = models_measured.page(record, generate.NOTE)
    headings, *rows = rows_in(page)
    assert {len(row) for row in [headings, *rows]} == {len(headings)}, "no row is short"
    assert [(row[0], row[3]) for row in rows] == [
        ("sdxl", "`baseline`"),
        ("", "`compile`"),
        ("flux-dev", "`baseline`"),
        ("", "`compile`"),
        ("sdxl-turbo", "`baseline`"),
    ]
    assert rows[0][1:3] == ["1024x1024", "50 steps, guidance 5"]
    assert rows[0][4].startswith("1.00 s ±")
    assert rows[0][5] == "1"
    assert rows[1][5].startswith("2.00x [")
    assert rows[1][6:] == ["-", "400 MB", "450 MB", "1.50 s", "0.200 s"]
    assert rows[4][2] == "1 step, none"
    assert rows[3][4:] == ["out_of_memory", *["-"] * 6]
    assert "- flux-dev, `compile`: out_of_memory: the allocation failed" in page
    assert "**random weights**" in page
    assert "- Test GPU; torch 2.13.0; vivace" in page
    assert page.count("Test GPU;") == 1
    assert "rounds (processes) a recipe: 1; timed calls a recipe: 3" in page
    assert page.count("differences under 10 % cannot be told from drift") == 1, "once for all rows"
    assert "- The warm-up ended before the times were steady: sdxl-turbo.\n" in page, "all rows of the model"
    assert page.count("random weights: times") == 0, "it stands above the table"


def test_each_purpose_has_a_table_and_each_model_a_line_at_a_glance(record: Path) -> None:
    slower = case("flux-schnell", "compile", make_round(0, (0.9, 0.91, 0.89)))
    cached = case("flux-schnell", "teacache(hits=0.5)", make_round(0, (0.5, 0.51, 0.49)))
    more = [case("flux-schnell", "baseline", make_round(0)), slower, cached]
    write_records(record, [*every_model.read_records(record).values(), *more])
    tables = tables_in(models_measured.page(record, generate.NOTE))
    assert list(tables) == ["At a glance", "Text to image, many steps", "Text to image, ten steps or fewer"]
    glance = tables["At a glance"]
    assert {len(line) for line in glance} == {10}
    assert [(line[0], line[5], line[7][:5]) for line in glance[1:]] == [
        ("sdxl", "`compile`", "2.00x"),
        ("flux-schnell", "not proven: `compile`", "1.11x"),
    ], "the step cache was faster, and skips work; one round tells nothing below 10 %"
