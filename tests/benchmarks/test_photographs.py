"""From which strength witnesses see damage, from values that are made up; the crops of photographs; the page."""

import json
from typing import Any

import numpy as np
import pytest

from benchmarks.photograph_crops import PHOTOGRAPHS
from benchmarks.photograph_power import seen_strengths
from benchmarks.photographs import RECORD
from docgen.photographs import page
from vivace.measure.damage import DAMAGE, HARMLESS

KINDS = {kind.name: kind for kind in DAMAGE}

NUM_PHOTOGRAPHS = 6


def made_up(size_at: dict[str, tuple[float, ...]]) -> list[dict[str, Any]]:
    """Return values of `match` of several photographs: noise of 0.01, plus so much at each strength of a kind."""
    random = np.random.default_rng(1)

    def values(level: float) -> dict[str, list[float]]:
        return {"match": list(level + 0.01 * random.standard_normal(20))}

    return [
        {
            "harmless": {change.name: values(0.0) for change in HARMLESS},
            "damaged": {
                kind.name: [values(level) for level in size_at.get(kind.name, (0.0,) * 5)] for kind in DAMAGE
            },
        }
        for _ in range(NUM_PHOTOGRAPHS)
    ]


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    """Rows by kind of damage: blur grows, banding is seen only in a run, a ghost never."""
    sizes = {"blur": (0.0, 0.02, 0.2, 0.3, 0.4), "banding": (0.01,) * 5, "shift": (0.9,) * 5}
    return {row["damage"]: row for row in seen_strengths(made_up(sizes))}


def test_damage_is_seen_from_where_nine_of_ten_values_are_beyond_the_harmless_ones(
    rows: dict[str, dict[str, Any]],
) -> None:
    blur, kind = rows["blur"], KINDS["blur"]
    assert kind.strengths[1] < blur["single"]["strength"] < kind.strengths[2]
    assert blur["single"]["low"] <= blur["single"]["strength"] <= blur["single"]["high"]
    assert blur["power"][0] < 0.1
    assert blur["power"][2:] == [1.0, 1.0, 1.0]
    assert rows["shift"]["single"]["strength"] == KINDS["shift"].strengths[0]


def test_the_page_says_what_the_record_says() -> None:
    record = json.loads(RECORD.read_text())
    text = page("", RECORD)
    assert f"{sum(p['crops'] for p in record['photographs'])} crops of {len(PHOTOGRAPHS)} photographs" in text
    assert (
        "call 0 of the 132 crops broken; of 132 each they name 132 that are black, 132 that are flat" in text
    )
    banding = [line for line in text.splitlines() if line.startswith("| banding, levels |")]
    assert banding[2] == "| banding, levels | – | – | – | – | – | – |", "no limit forbids it"
    (blurred,) = (row for row in record["rows"] if (row["witness"], row["damage"]) == ("match", "blur"))
    assert f"| blur, px | {blurred['single']['strength']:.2g} (" in text
    for photograph in PHOTOGRAPHS:
        assert (
            f"| {photograph.name} | `{photograph.package}`: {photograph.file} | {photograph.licence} |"
            in text
        )
