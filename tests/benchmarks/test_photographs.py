"""From which strength witnesses see damage, from values that are made up; the crops of photographs; the page."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from benchmarks.photograph_crops import CROPS, PHOTOGRAPHS, SIZES, Photograph, crops_of
from benchmarks.photograph_power import LIMITS, seen_strengths
from benchmarks.photograph_witnesses import Reference, distances
from benchmarks.photographs import RECORD, main
from docgen.photographs import WITNESSES, page
from vivace.errors import UsageError
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


def test_a_run_sees_weaker_damage_than_a_pair(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["banding"]["single"]["strength"] is None
    assert rows["banding"]["run"]["strength"] == KINDS["banding"].strengths[0]
    assert rows["blur"]["run"]["strength"] < rows["blur"]["single"]["strength"]
    assert rows["ghost"]["run"]["strength"] is None


def test_a_limit_forbids_less_than_is_seen(rows: dict[str, dict[str, Any]]) -> None:
    assert LIMITS["match"] == (pytest.approx(0.1), "higher")
    assert rows["banding"]["limit"]["strength"] is None
    assert rows["blur"]["limit"]["strength"] > rows["blur"]["run"]["strength"]


def test_crops_are_the_same_each_time_and_no_larger_than_the_photograph(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (300, 400, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    photograph = PHOTOGRAPHS[1]
    with zipfile.ZipFile(tmp_path / f"{photograph.package}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(photograph.file, file.getvalue())
    crops, again = crops_of(photograph, tmp_path), crops_of(photograph, tmp_path)
    assert len(crops) == CROPS
    assert {crop.size for crop in crops} == {min(300, size) for size in SIZES}
    assert all((crop.image == other.image).all() for crop, other in zip(crops, again, strict=True))
    with pytest.raises(UsageError, match=r"does not hold there.png; take another version"):
        crops_of(Photograph("x", photograph.package, "there.png", "", ""), tmp_path)
    with pytest.raises(UsageError, match=r"no wheel of other_one; pip download .* other-one"):
        crops_of(Photograph("x", "other_one", "there.png", "", ""), tmp_path)


def test_an_undamaged_image_is_at_no_distance() -> None:
    image = np.random.default_rng(0).integers(0, 255, (64, 64, 3)).astype(np.float64)
    same = distances(image, Reference.of(image, slow=False))
    assert {name for name in same if name != "PSNR"} == {
        name for name in WITNESSES if name not in ("PSNR", "SSIM", "tiny-clip")
    }
    assert max(abs(value) for name, value in same.items() if name != "PSNR") == pytest.approx(0, abs=1e-9)
    assert same["PSNR"] == -100
    damaged = distances(KINDS["darker"].apply(image, 20), Reference.of(image, slow=False))
    assert damaged["brightness"] < -10


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["record", "--wheels", str(tmp_path), "--out", str(tmp_path)])
    assert isinstance(result.exception, UsageError)
    assert "measure --wheels FOLDER" in str(result.exception)
    result = CliRunner().invoke(main, ["measure", "--wheels", str(tmp_path), "--only", "moon"])
    assert isinstance(result.exception, UsageError)
    assert "--only moon: no such photograph" in str(result.exception)


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
