"""The simulation of intervals and verdicts, and what the README says of it."""

import json
from pathlib import Path

import pytest

from benchmarks import coverage, movement_coverage, sequential_coverage
from benchmarks.command import run
from benchmarks.noises import NOISES


@pytest.mark.parametrize("noise", NOISES)
def test_shares_of_a_few_comparisons(noise: str) -> None:
    shares = coverage.simulate(noise, recipes=5, rounds=3, samples=10, process_sd=0.01, repeats=40)
    assert shares["speedup"] > 0.85
    assert shares["latency"] > 0.85
    assert shares["false"] <= 0.05
    assert shares["power_3"] < shares["power_10"]


def test_the_stopping_rule_stops() -> None:
    shares = coverage.simulate("Gaussian, 1 %", recipes=2, rounds=2, samples=None, process_sd=0.0, repeats=20)
    assert shares["power_10"] > 0.8


def test_the_command_writes_every_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (coverage, sequential_coverage):
        monkeypatch.setattr(module, "NOISES", {"Gaussian, 1 %": NOISES["Gaussian, 1 %"]})
    monkeypatch.setattr(sequential_coverage, "SLOWDOWNS", (0.0, 0.1))
    drift = "drift of ±10 %, period of two rounds"
    monkeypatch.setattr(movement_coverage, "MOVES", {drift: movement_coverage.MOVES[drift]})
    monkeypatch.setattr(movement_coverage, "ROUNDS", (2,))
    monkeypatch.setattr(coverage, "ROUNDS", (1, 2))
    monkeypatch.setattr(coverage, "SAMPLES", (4, None))
    path = tmp_path / "coverage.json"
    assert run(coverage.command, ["--repeats", "10", "--record", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    cases = {(row["process_sd"], row["recipes"], row["rounds"], row["samples"]) for row in rows}
    assert len(cases) == len(rows) == 3 * 2 * 2 * 2
    assert "1: covers" in capsys.readouterr().out
    assert len(json.loads(path.read_text())["movement"]) == 3 * 2


def test_what_the_readme_says_holds_in_the_record() -> None:
    rows = json.loads(coverage.RESULTS.read_text())["rows"]
    assert {row["noise"] for row in rows} == set(NOISES)
    assert round(max(row["false"] for row in rows), 2) <= 0.02, "a recipe against itself"
    usual = [row for row in rows if row["rounds"] > 1 and row["process_sd"] <= 0.01]
    assert min(row["speedup"] for row in usual) >= 0.93


def test_movement_within_rounds_makes_few_recipes_faster_than_themselves() -> None:
    record = json.loads(coverage.RESULTS.read_text())
    rows = record["movement"]
    assert {row["move"] for row in rows} == set(movement_coverage.MOVES)
    assert max(row["canaries"]["false"] for row in rows) <= 0.025, "200 comparisons of each"
    assert max(row["fixed order"]["false"] for row in rows) > 0.2, "what canaries are for"


def test_drift_with_a_period_of_two_rounds_is_seen() -> None:
    drift = "drift of ±10 %, period of two rounds"
    old, new = (
        movement_coverage.simulate(drift, design, recipes=2, rounds=6, process_sd=0.0, repeats=40)
        for design in movement_coverage.DESIGNS
    )
    assert old["false"] > 0.1
    assert new["false"] == 0


def test_compare_is_rarely_wrong_in_a_few_simulations() -> None:
    same = sequential_coverage.simulate_pairs("Gaussian, 1 %", process_sd=0.0, slowdown=0.0, repeats=20)
    assert same["slower"] == 0
    assert same["same"] > 0.8
    worse = sequential_coverage.simulate_pairs("Gaussian, 1 %", process_sd=0.01, slowdown=0.1, repeats=20)
    assert worse["slower"] == worse["failed"] == 1
    assert worse["pairs"] < same["pairs"]


def test_what_the_page_says_of_compare_holds_in_the_record() -> None:
    rows = json.loads(coverage.RESULTS.read_text())["pairs"]
    assert {row["noise"] for row in rows} == set(NOISES)
    assert max(row["slower"] + row["faster"] for row in rows if row["slowdown"] == 0) <= 0.02
    assert max(row["failed"] for row in rows if row["slowdown"] <= sequential_coverage.FAIL_IF) <= 0.02
    assert max(row["same"] for row in rows if row["slowdown"] >= 0.01) <= 0.05
    assert max(row["passed"] for row in rows if row["slowdown"] >= sequential_coverage.FAIL_IF) <= 0.05
