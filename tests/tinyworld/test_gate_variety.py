"""The measurement of the gate's verdicts on images that differ too little from each other."""

import json
from pathlib import Path

import numpy as np
import pytest

from tinyworld import gate_variety
from tinyworld.collapses import CALIBRATED, HELD_OUT, PROMPTS
from vivace.models.prompts import NUM_SEEDS

PAGE = Path(__file__).parents[2] / "docs/quality.md"


def test_the_page_says_what_was_recorded() -> None:
    record = json.loads(gate_variety.RECORD.read_text())
    assert gate_variety.tables(record) in PAGE.read_text()


def test_what_was_recorded_is_worth_having() -> None:
    record = json.loads(gate_variety.RECORD.read_text())
    collapsed = [row["verdict"] for row in record["rows"] if row["label"] == "collapsed"]
    assert len(collapsed) == len(gate_variety.MORE_SETS) * len(CALIBRATED | HELD_OUT)
    assert "passed" not in collapsed
    assert collapsed.count("failed") > 0.95 * len(collapsed)
    assert {row["verdict"] for row in record["rows"] if row["label"] != "collapsed"} == {"passed"}
    assert all(row["failed"] <= 0.02 * row["splits"] for row in record["other_seeds"])


@pytest.mark.parametrize("name", CALIBRATED | HELD_OUT)
def test_a_collapse_changes_images_and_leaves_their_number(name: str) -> None:
    images = np.random.default_rng(0).integers(0, 255, (NUM_SEEDS * len(PROMPTS), 32, 32, 3), dtype=np.uint8)
    made = (CALIBRATED | HELD_OUT)[name](images)
    assert (made.shape, made.dtype) == (images.shape, images.dtype)
    assert (made != images).any()
