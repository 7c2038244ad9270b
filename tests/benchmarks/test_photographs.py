"""From which strength witnesses see damage, from values that are made up; the crops of photographs; the page."""

from typing import Any

import numpy as np
import pytest

from benchmarks.photograph_power import seen_strengths
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
