"""The page that says which technique to use: what it picks from records, and what it points to."""

import re
from pathlib import Path

import pytest

from docgen import choosing
from docgen.choosing import IMAGES, Pick, page, picks
from docgen.step_curves import families
from tests.benchmarks.test_step_curves_page import case, write

ROOT = Path(__file__).parents[2]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return write(
        tmp_path,
        [
            case("baseline", 1.0, 1.0),
            case("steps(18)", 0.75, 0.90),
            case("steps(13)", 0.5, 0.70),
            case("steps(7)", 0.25, 0.60),
            case("deepcache(2)", 0.6, 0.97),
            case("deepcache", 0.45, 0.95),
            case("deepcache(5)", 0.35, 0.80),
            case("prune(0.2)", 0.6, 0.72),
        ],
    )


def test_the_closest_of_those_that_save_enough(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (family,) = families(results)
    assert picks(family) == [], "nothing here was judged by its content"

    ruined = {"deepcache(5)", "steps(7)"}
    monkeypatch.setattr(choosing, "_passed", lambda point: point.row.recipe not in ruined)

    def summary(pick: Pick) -> tuple[float, str, str | None]:
        return pick.level, pick.point.row.recipe, pick.rival.row.recipe if pick.rival else None

    # deepcache(2) is the closest from 1.25x to 1.5x, and deepcache that at 2x; nothing that passed saves more.
    assert [summary(pick) for pick in picks(family)] == [
        (1.5, "deepcache(2)", "steps(13)"),
        (2.0, "deepcache", "steps(13)"),
    ]
    text = page("note\n", results)
    assert "**2 times as fast**: `deepcache`, [SSIM 0.950]" in text
    assert "`steps(13)` has 0.700" in text
    assert "Not worth using, since fewer plain steps do as well or better: `prune`." in text


def test_what_it_points_to_is_there() -> None:
    text = (ROOT / "docs" / "choosing.md").read_text()
    targets = re.findall(r"\]\(([^)#]+)\)", text)
    assert len(targets) > 3
    for target in targets:
        assert (ROOT / "docs" / target).exists(), target
    assert {path.name for path in IMAGES.glob("choosing-*.png")} == {
        Path(t).name for t in targets if t.startswith("images/")
    }
