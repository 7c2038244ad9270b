"""The figures of whole images on the pages of docs/performance are those of a committed record."""

import functools
import json
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "performance").glob("*.md"))
Figures = dict[str, set[float]]
"""Of one record: "time", "peak", "first", "busy" and "joules", as a page may give each: of a round, or of all."""
_NEW_PROMPTS = "new-prompts.jsonl"
_HEADINGS = {
    "s/image": "time",
    "s/image, text encoders included": "time",
    "GPU busy": "busy",
    "J/image": "joules",
    "peak": "peak",
    "first call": "first",
}


def records_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "rounds" in value and "trial" in value:
            yield value
        else:
            for part in value.values():
                yield from records_in(part)
    elif isinstance(value, list):
        for part in value:
            yield from records_in(part)


def parsed(path: Path) -> Any:
    text = path.read_text()
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


@functools.cache
def figures() -> tuple[Figures, ...]:
    columns = []
    for path in sorted((ROOT / "results").glob("*.json*")):
        if not path.name.startswith(("flux-", "techniques-", "fused-", "throughput-", "large-")):
            continue
        for record in records_in(parsed(path)):
            rounds = [r for r in record["rounds"] if r.get("samples")]
            if rounds:
                columns.append(figures_of(rounds))
    # Of these times alone are known.
    columns += [
        {"time": {statistics.median(row["known_s"])}} for row in parsed(ROOT / "results" / _NEW_PROMPTS)
    ]
    return tuple(columns)


def figures_of(rounds: list[dict[str, Any]]) -> Figures:
    medians = [statistics.median(s["total_s"] for s in r["samples"]) for r in rounds]
    busy = [r["gpu_busy_s"] for r in rounds if r.get("gpu_busy_s")]
    windows = [r["gpu"] for r in rounds if r.get("gpu")]
    joules = [w["energy_j"] / w["calls"] for w in windows if w.get("energy_j") and w["calls"]]
    return {
        "time": {math.exp(statistics.fmean(map(math.log, medians)))},
        "peak": {max(r["memory"]["peak_bytes"] / 1e9 for r in rounds if r.get("memory"))},
        "first": {rounds[0].get("first_call_s") or 0.0},
        "busy": {*busy, statistics.median(busy)} if busy else set(),
        "joules": {*joules, statistics.fmean(joules)} if joules else set(),
    }


def printed(cell: str) -> tuple[float, float] | None:
    """The number that a cell begins with and what its last digit may hide; None without one."""
    if not (match := re.match(r"([\d,]+(?:\.\d+)?)(?: |$)", cell)):
        return None
    text = match[1].replace(",", "")
    return float(text), 0.5001 * 10.0 ** -len(text.partition(".")[2])


def rows_of(page: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Each row of a table of whole images: its line, and its cells by figure."""
    names: list[str | None] = []
    # What is called the fastest known is checked in tests/benchmarks/test_fastest_known.py.
    text = re.sub(r"<!-- fastest .*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
    for line in text.splitlines():
        if not line.startswith("|"):
            names = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not names:
            names = [_HEADINGS.get(cell) for cell in cells]
        elif {"time", "peak"} <= set(names) and not line.startswith("| ---"):
            yield line, {name: cell for name, cell in zip(names, cells, strict=True) if name}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_row_of_whole_images_is_of_one_record(page: Path) -> None:
    rows, missing = list(rows_of(page)), []
    for line, cells in rows:
        printed_numbers = {
            name: number for name, cell in cells.items() if (number := printed(cell)) is not None
        }
        is_timed_alone = _NEW_PROMPTS in line
        assert {"time"} | ({"peak"} if not is_timed_alone else set()) <= set(printed_numbers), line
        if not any(
            all(
                any(abs(value - number) <= slack for value in of.get(name, ()))
                for name, (number, slack) in printed_numbers.items()
            )
            for of in figures()
        ):
            missing.append(line)
    assert missing == []


def test_pages_have_such_rows() -> None:
    assert sum(len(list(rows_of(page))) for page in PAGES) > 20
