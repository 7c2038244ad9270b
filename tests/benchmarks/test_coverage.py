"""The simulation of intervals and verdicts, and what the README says of it."""

import json

import pytest

from benchmarks import command_coverage, coverage
from benchmarks.noises import NOISES


def test_what_the_readme_says_holds_in_the_record() -> None:
    rows = json.loads(coverage.RESULTS.read_text())["rows"]
    assert {row["noise"] for row in rows} == set(NOISES)
    # Of 360 cells of a hundred comparisons each, some have three or four by chance where one in a hundred is called.
    assert max(row["false"] for row in rows) <= 0.04, "a recipe against itself"
    assert sum(row["false"] for row in rows) / len(rows) <= 0.01
    usual = [row for row in rows if row["rounds"] > 1 and row["process_sd"] <= 0.01]
    assert min(row["speedup"] for row in usual) >= 0.93


def test_no_command_is_misled_by_movement_within_rounds() -> None:
    """As the record has it: every command, under every movement of the machine."""
    rows = json.loads(coverage.RESULTS.read_text())["commands"]
    assert {row["move"] for row in rows} == set(command_coverage.MOVES)
    assert {row["command"] for row in rows} == set(command_coverage.DESIGNS) - {"compare"}
    for row in (row for row in rows if row["command"] != "short final"):
        assert row["covered"] >= 0.86, row  # 100 comparisons: a share of 0.92 may read 0.87
        assert row["false"] <= 0.04, row


@pytest.mark.parametrize("period", ["0.5 round", "1 round", "2 rounds"])
def test_drift_of_any_period_calls_no_recipe_faster_than_itself(period: str) -> None:
    shares = command_coverage.simulate("bench-2", 4, f"period of {period}, ±12%", 0.01, 12)
    assert shares["false"] == 0
    assert shares["covered"] >= 0.8


def test_what_the_page_says_of_compare_holds_in_the_record() -> None:
    rows = json.loads(coverage.RESULTS.read_text())["pairs"]
    assert {row["move"] for row in rows} == set(command_coverage.MOVES)
    assert max(row["slower"] + row["faster"] for row in rows if row["slowdown"] == 0) <= 0.025
    assert max(row["failed"] for row in rows if row["slowdown"] <= command_coverage.FAIL_IF) <= 0.025
    assert max(row["same"] for row in rows if row["slowdown"] >= 0.03) <= 0.05
    assert max(row["passed"] for row in rows if row["slowdown"] >= command_coverage.FAIL_IF) <= 0.05
