"""`vivace calibrate schedule`: which steps are computed, for a number that is given."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.families import session
from tests.typed import typed
from vivace.errors import Unsupported, UsageError
from vivace.models.find import find_model
from vivace.runtime.cache_fits import calibrate_schedule, evenly_spread, search


def distance(mask: str) -> float:
    """Return a distance with one least mask: early steps count most, and gaps cost their square."""
    gaps = [len(part) for part in mask.split("1")[1:]]
    return sum((1 + gap) ** 2 / (3 + k) for k, gap in enumerate(gaps)) + 1e-3 * mask.count("11")


def test_the_search_finds_the_least_mask_and_keeps_the_budget() -> None:
    asked: list[str] = []

    def ask(mask: str) -> float:
        asked.append(mask)
        return distance(mask)

    found = search(evenly_spread(5, 14), ask, 300)
    every = (
        "".join("1" if k in {0, *places} else "0" for k in range(14))
        for places in combinations(range(1, 14), 4)
    )
    assert distance(found) == min(map(distance, every))
    assert len(asked) == len(set(asked)) <= 300
    assert {(mask[0], mask.count("1"), len(mask)) for mask in asked} == {("1", 5, 14)}

    remembered, more = {mask: distance(mask) for mask in asked[:20]}, []

    def ask_again(mask: str) -> float:
        if mask not in remembered:
            more.append(mask)
            remembered[mask] = distance(mask)
        return remembered[mask]

    assert search(evenly_spread(5, 14), ask_again, 300) == found
    assert more == asked[20:], "it goes on where it ended"


def test_no_more_masks_are_tried_than_allowed() -> None:
    asked: list[str] = []
    search(evenly_spread(3, 12), lambda mask: asked.append(mask) or distance(mask), 7)
    assert len(asked) == 7
    assert search("1", distance, 5) == "1"


def test_a_schedule_is_calibrated_by_hand_and_taken_by_a_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    file = tmp_path / "schedule.json"
    command = [
        "calibrate",
        "schedule",
        "--model",
        "tiny-sd",
        "--budget",
        "3/6",
        "--images",
        "1",
        "--threads",
        "1",
    ]
    for tries in ("3", "4"):
        more = ["--tries", tries, "--output", str(file)]
        assert typed(monkeypatch, *command, *more, "--height", "64", "--width", "64", "--json") == 0
        printed = capsys.readouterr()
        answer = json.loads(printed.out)
        assert f"at most {tries} schedules, 1 images of 3 computed steps each; at most about" in printed.err
        assert len(answer["distances"]) == int(tries)
    assert answer["distances"][answer["mask"]] == min(answer["distances"].values()) > 0
    assert json.loads(file.read_text())["mask"] == answer["mask"]
    made = session("sd", f"taylorseer(order=0, mask='{file}')")
    assert made.effects["taylorseer@denoiser"]["denoiser.taylorseer"] == f"mask={answer['mask']}"
    assert typed(monkeypatch, *command, "--output", str(file), "--cache", "deepcache") == 2
    assert "was searched with another cache" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "how", "why"),
    [
        ("tiny-sd", {"cache": "bf16"}, "is not one step cache"),
        ("tiny-sd", {"cache": "taylorseer(hits=0.5)"}, "without hits and mask"),
        ("tiny-sd", {"budget": 6}, "skips nothing"),
        ("synthetic:sd15", {}, "random weights"),
    ],
)
def test_what_cannot_be_searched(model: str, how: dict[str, Any], why: str, tmp_path: Path) -> None:
    arguments = {"cache": "taylorseer", "budget": 3, "num_steps": 6, "path": tmp_path / "s.json"} | how
    with pytest.raises((UsageError, Unsupported), match=why):
        calibrate_schedule(find_model(model), "cpu", ["a red circle"], **arguments)
