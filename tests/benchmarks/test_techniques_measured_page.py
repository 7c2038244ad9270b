"""The page of all techniques, made of records: scaled, compared with the right baseline, sorted, losers included."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.record_files import write_records
from benchmarks.technique_cases import first_calls_file, record_file
from docgen import techniques_measured
from docgen.generate import NOTE
from tests.make import make_record, make_round
from vivace.foundation.spec.record import Outcome, Record, Round
from vivace.models.find import find_model


def case(recipe: str, steps: int, *rounds: Round) -> Record:
    record = make_record(recipe, *rounds)
    located = find_model("synthetic:flux-dev")
    workload = record.trial.workload.model_copy(update={"num_inference_steps": steps})
    trial = record.trial.model_copy(update={"model": located.model, "workload": workload, "device": "cuda"})
    environment = record.environment.model_copy(update={"device": "cuda", "device_name": "Test GPU"})
    return record.model_copy(update={"trial": trial, "environment": environment})


def round_of(seconds: float, **changes: Any) -> Round:
    return make_round(0, (seconds,) * 4).model_copy(update=changes)


def rows_of(page: str, first: str = "recipe") -> list[list[str]]:
    lines = page.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


@pytest.fixture
def results(tmp_path: Path) -> Path:
    records = [
        case("baseline", 8, round_of(1.0)),
        case("fuse_qkv", 8, round_of(0.5)),
        case("attention(math)", 8, round_of(4.0)),
        case(
            "attention(sage)", 8, make_round(0, outcome=Outcome.UNSUPPORTED, reason="sage is not installed")
        ),
        case("baseline", 8, round_of(2.0, conditions={"python_ms": 3.0, "python_after_ms": 3.0})),
        case("channels_last", 8, round_of(2.0, conditions={"python_ms": 6.0, "python_after_ms": 6.0})),
        case("compile", 8, round_of(1.0)),
        case("baseline", 28, round_of(3.5)),
        case("compile", 28, round_of(1.4)),
    ]
    write_records(tmp_path / record_file("flux-dev").name, records)
    write_records(
        tmp_path / first_calls_file(record_file("flux-dev")).name,
        [case("compile", 8, round_of(1.0, first_call_s=80.0))],
    )
    return tmp_path


def test_rows_are_scaled_and_sorted_and_the_losers_are_shown(results: Path) -> None:
    page = techniques_measured.page(NOTE, results)
    rows = rows_of(page)
    # eight tenths of a call are its steps: 0.2 + 0.8 * 28 / 8 = 3 times
    assert [row[:4] for row in rows] == [
        ["`compile`", "1.40 s ±0.0 %", "28", "2.50x [2.50, 2.50]"],
        ["`fuse_qkv`", "1.50 s ±0.0 %", "8", "2.00x [2.00, 2.00]"],
        ["`baseline`", "3.50 s ±0.0 %", "28", "1"],
        ["`channels_last`", "6.00 s ±0.0 %", "8", "1.00x [1.00, 1.00]"],
        ["`attention(math)`", "12.0 s ±0.0 %", "8", "0.25x [0.25, 0.25]"],
    ]
    assert [row[4] for row in rows] == ["faster", "faster", "baseline", "unclear", "slower"]
    assert rows[0][8:] == ["1.50 s", "80.0 s"]
    assert rows[1][9] == "-"
    assert "- `attention(sage)`: unsupported: sage is not installed" in page
    assert "- `channels_last`: the CPU ran Python 2.0 times as slowly" in page
    assert "## sd15" not in page, "there is no record of it"
    assert "Ten configurations" not in page, "they are not measured yet"
