"""A seeded sample of what `make soak` tests in full: pairs and random recipes compose, or give a reason."""

from collections.abc import Iterator

import pytest

from docgen.composition import page
from tests.composition.recipes import (
    MODELS,
    NUM_RANDOM,
    Case,
    legal_pairs,
)
from tests.composition.run import (
    Drawer,
    complaint,
    complaints,
    read,
    sample,
    with_members,
    write,
)
from vivace.techniques import TECHNIQUES

PAIRS, RANDOM = 25, 15
NUM_LONG = 12


@pytest.fixture(scope="module")
def drawer() -> Iterator[Drawer]:
    with Drawer() as shared_drawer:
        yield shared_drawer


@pytest.mark.long
def test_the_sample_has_every_technique_and_both_models() -> None:
    cases = sample(PAIRS, RANDOM)
    assert len(cases) == PAIRS + RANDOM
    assert {name for case in cases for name in case.names} == set(TECHNIQUES)
    assert {case.model for case in cases} == set(MODELS)


# One test for all, so that members shared by recipes are generated only once.
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(NUM_LONG, marks=pytest.mark.long),
        pytest.param(PAIRS + RANDOM, marks=pytest.mark.soak),
    ],
)
@pytest.mark.timeout(900)
def test_recipes_compose_or_give_a_reason(drawer: Drawer, number: int) -> None:
    rows = [drawer.draw(case) for case in with_members(sample(PAIRS, RANDOM)[:number])]
    assert complaints(rows) == []
    assert sum(row["outcome"] == "measured" for row in rows) > len(rows) / 3, "many recipes run"


def row(recipe: str, names: tuple[str, ...], **changed: object) -> dict[str, object]:
    plain = {
        "outcome": "measured",
        "reason": None,
        "warnings": [],
        "psnr_db": 60.0,
        "repeat_psnr_db": 200.0,
        "faults": [],
    }
    return plain | {"kind": "pair", "model": "tiny-sd", "recipe": recipe, "names": names} | changed


def test_broken_rules_are_named() -> None:
    exact, names = "channels_last+inference_mode", ("channels_last", "inference_mode")
    assert complaint(row(exact, names), {}) is None
    assert "39.0 dB" in str(complaint(row(exact, names, psnr_db=39.0), {}))
    assert complaint(row(exact, names, outcome="crashed", reason="signal 11"), {}) == "crashed: signal 11"
    assert "without a reason" in str(complaint(row(exact, names, outcome="no_effect"), {}))
    assert "second call" in str(complaint(row(exact, names, repeat_psnr_db=20.0), {}))
    assert "black" in str(complaint(row(exact, names, faults=["black"]), {}))

    rounded, names = "dtype(bf16)+quantize(int8)", ("dtype", "quantize")
    singles = {
        ("tiny-sd", "dtype(bf16)"): row("dtype(bf16)", ("dtype",), psnr_db=35.0),
        ("tiny-sd", "quantize(int8)"): row("quantize(int8)", ("quantize",), psnr_db=30.0),
    }
    assert complaint(row(rounded, names, psnr_db=24.5), singles) is None
    assert "worst member alone 30.0" in str(complaint(row(rounded, names, psnr_db=23.5), singles))

    idle = row("compile+steps(12)", ("compile", "steps"), kind="named", compiled_graphs=0)
    assert complaint(idle, {}) == "nothing was compiled"

    free = "dtype(bf16)+steps(12)"
    assert complaint(row(free, ("dtype", "steps"), psnr_db=5.0), {}) is None, "it may change the image"


@pytest.mark.long
def test_a_hanging_recipe_ends(drawer: Drawer) -> None:
    case = Case("pair", "tiny-sd", "steps(1000)+inference_mode", ("steps", "inference_mode"))
    assert drawer.draw(case, timeout_s=1.0)["outcome"] == "timed_out"
    assert drawer.draw(Case("single", "tiny-sd", "steps(2)", ("steps",)))["outcome"] == "measured", (
        "the next case runs"
    )


def test_the_page_counts_the_rows_of_the_record(tmp_path) -> None:
    path = tmp_path / "composition.json"
    record = read(path)
    record["rows"] += [
        row("channels_last+steps(12)", ("channels_last", "steps")),
        row("steps(12)+tf32", ("tf32", "steps"), outcome="unsupported", reason="tf32: a CPU has none"),
        row("channels_last+inference_mode", ("channels_last", "inference_mode"), psnr_db=9.0),
    ]
    write(path, record)
    text = page(path, "a note\n")
    assert f"3 of {len(legal_pairs())} legal pairs" in text
    assert f"0 of {NUM_RANDOM} random recipes" in text
    assert "- u tf32: a CPU has none (tiny-sd; 1 pair)" in text
    assert "tiny-sd channels_last+inference_mode`: exact techniques, but 9.0 dB" in text
