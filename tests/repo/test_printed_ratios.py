"""Every speed-up of the study pages is the quotient of the times that its row prints."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

STUDIES = sorted((Path(__file__).parents[2] / "docs" / "studies").glob("*.md"))
_TIME = r"(?P<{0}>[\d.]+) (?P<{0}_unit>ms|s)"
_CELL = re.compile(
    rf"^{_TIME.format('own')}, (?P<ratio>[\d.]+)× (?P<interval>\[[^\]]*\])(?: of {_TIME.format('of')})?(?:\\\*)?$"
)
_BASE = re.compile(rf"^{_TIME.format('own')}(?:\\\*)?$")
_PAIR = re.compile(
    rf"(?:^|; |\. )(?P<row>[^;]+?) {_TIME.format('after')}(?: beside a baseline of {_TIME.format('base_after')})?, "
    rf"(?P<than>[^;]+?) {_TIME.format('before')}(?: beside one of {_TIME.format('base_before')})?, "
    r"(?P<ratio>[\d.]+)x \["
)


def ends(text: str, unit: str = "s") -> tuple[float, float]:
    """The values that are printed so, in seconds."""
    decimals = len(text.partition(".")[2])
    half = 0.5 * 10.0**-decimals
    if not decimals and len(text) > 3:
        half *= 10.0 ** (len(text) - 3)
    scale = 1e-3 if unit == "ms" else 1.0
    return (float(text) - half) * scale, (float(text) + half) * scale


def of(match: re.Match[str], name: str) -> tuple[float, float]:
    return ends(match[name], match[f"{name}_unit"])


def agree(ratio: str, before: tuple[float, float], after: tuple[float, float]) -> bool:
    low, high = ends(ratio)
    slack = 1.002  # three digits were rounded from what was rounded nowhere else
    return before[0] / after[1] <= high * slack and low <= before[1] / after[0] * slack


def table_ratios(text: str) -> Iterator[tuple[str, bool]]:
    """Each measured cell with a speed-up, and whether it is that of the times."""
    bases: dict[int, tuple[float, float]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("|"):
            bases = {}
            continue
        for place, cell in enumerate(cells):
            if (base := _BASE.match(cell)) and place not in bases:
                bases[place] = of(base, "own")
            if not (match := _CELL.match(cell)):
                continue
            before = of(match, "of") if match["of"] else bases.get(place)
            yield line, before is not None and agree(match["ratio"], before, of(match, "own"))


def conclusion_ratios(text: str) -> Iterator[tuple[str, bool]]:
    for line in text.splitlines():
        if not line.startswith("  - here"):
            continue
        for match in _PAIR.finditer(line):
            before, after = of(match, "before"), of(match, "after")
            if match["base_after"]:
                before = (before[0] / of(match, "base_before")[1], before[1] / of(match, "base_before")[0])
                after = (after[0] / of(match, "base_after")[1], after[1] / of(match, "base_after")[0])
            yield line, agree(match["ratio"], before, after)


@pytest.mark.parametrize("page", STUDIES, ids=lambda page: page.stem)
def test_a_printed_speed_up_is_the_quotient_of_printed_times(page: Path) -> None:
    text = page.read_text()
    ratios = [*table_ratios(text), *conclusion_ratios(text)]
    assert [line for line, is_right in ratios if not is_right] == []
    assert len(ratios) > 10
