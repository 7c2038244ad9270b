"""The simulation of intervals and verdicts, and what the README says of it."""

import json
from pathlib import Path

import pytest

from benchmarks import coverage
from benchmarks.command import run


@pytest.mark.parametrize("noise", coverage.NOISES)
def test_shares_of_a_few_comparisons(noise: str) -> None:
    found = coverage.simulate(noise, recipes=5, rounds=3, samples=10, process_sd=0.01, repeats=40)
    assert found["speedup"] > 0.85
    assert found["latency"] > 0.85
    assert found["false"] <= 0.05
    assert found["power_3"] < found["power_10"]


def test_the_stopping_rule_stops() -> None:
    found = coverage.simulate("Gaussian, 1 %", recipes=2, rounds=2, samples=None, process_sd=0.0, repeats=20)
    assert found["power_10"] > 0.8


def test_the_command_writes_every_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(coverage, "NOISES", {"Gaussian, 1 %": coverage.NOISES["Gaussian, 1 %"]})
    monkeypatch.setattr(coverage, "ROUNDS", (1, 2))
    monkeypatch.setattr(coverage, "SAMPLES", (4, None))
    path = tmp_path / "coverage.json"
    assert run(coverage.command, ["--repeats", "10", "--record", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    cases = {(row["process_sd"], row["recipes"], row["rounds"], row["samples"]) for row in rows}
    assert len(cases) == len(rows) == 3 * 2 * 2 * 2
    assert "1: covers" in capsys.readouterr().out


def test_what_the_readme_says_holds_in_the_record() -> None:
    rows = json.loads(coverage.RESULTS.read_text())["rows"]
    assert {row["noise"] for row in rows} == set(coverage.NOISES)
    assert round(max(row["false"] for row in rows), 2) <= 0.02, "a recipe against itself"
    usual = [row for row in rows if row["rounds"] > 1 and row["process_sd"] <= 0.01]
    assert min(row["speedup"] for row in usual) >= 0.93
