"""The record of kernels compiled for GPUs that nobody measured, and what docs/hardware.md says of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import memory_caps
from docgen import hardware
from vivace.evidence.standing import compiled_recipes
from vivace.evidence.tables import EvidenceRow, EvidenceTable
from vivace.foundation.hardware import shared_memory_bytes
from vivace.foundation.stats import Interval
from vivace.machinery.technique import Machine
from vivace.recipes.describe import states
from vivace.techniques import TECHNIQUES

RECORD = Path(__file__).parents[2] / "results/kernels-compiled.json"
ROWS = {row["capability"]: row for row in json.loads(RECORD.read_text())["capabilities"]}


def page_of(path: Path, **changes: Any) -> str:
    """Return the page from a record in which the row of an RTX 50 is another."""
    rows = [row | changes if text == "12.0" else row for text, row in ROWS.items()]
    path.write_text(json.dumps({"triton": "3.6.0", "capabilities": rows}))
    return hardware.page("", path, memory_caps.PLAN, memory_caps.RECORD)


def cells_of(page: str, recipe: str) -> dict[str, str]:
    """Return a recipe's cells by column."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines()]
    heads = next(line for line in lines if line[0] == "recipe")
    return dict(zip(heads, next(line for line in lines if line[0] == f"`{recipe}`"), strict=True))


def test_what_is_only_compiled_has_no_tick(tmp_path: Path) -> None:
    cells = cells_of(page_of(tmp_path / "record.json"), "fused(fp8, convolutions=fp8)")
    assert cells["Hopper, H100 (9.0)"] == "✓"
    assert cells["Blackwell, RTX 50 (12.0)"] == cells["Blackwell, B200 (10.0)"] == "compiled"
    assert cells["Ampere, A100 (8.0)"].startswith("[")


def test_other_techniques_keep_their_ticks(tmp_path: Path) -> None:
    assert "compiled" not in cells_of(page_of(tmp_path / "record.json"), "quantize(fp8)").values()


def test_a_row_says_what_it_rests_on(tmp_path: Path) -> None:
    page = page_of(tmp_path / "record.json")
    assert cells_of(page, "fused(fp8)")["rests on"] == "measured: H100, H200"
    assert cells_of(page, "quantize(nvfp4)")["rests on"] == "declared"
    row = EvidenceRow(
        recipe="bf16+quantize(fp8)", num_techniques=2, same_picture=True, latency=Interval(1.0, None, None)
    )
    table = EvidenceTable(
        kind="community", place="x.json", model="sdxl", gpu="NVIDIA L4", baseline="baseline", rows=(row,)
    )
    page = hardware.page("", tmp_path / "record.json", memory_caps.PLAN, memory_caps.RECORD, [table])
    assert cells_of(page, "quantize(fp8)")["rests on"] == "reported by others: L4"


def test_a_kernel_that_does_not_compile_is_named(tmp_path: Path) -> None:
    page = page_of(tmp_path / "record.json", failures={"_convolve": "OutOfResources: 110,680 bytes"})
    assert "`_convolve`: OutOfResources: 110,680 bytes" in page
    assert cells_of(page, "fused(bf16)")["Blackwell, RTX 50 (12.0)"] != "compiled"


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_what_is_allowed_compiles(capability: tuple[int, int]) -> None:
    row = ROWS[f"{capability[0]}.{capability[1]}"]
    machine = Machine("cuda", "the GPU", capability, "c++", has_all_packages=True)
    allowed = {s["recipe"] for s in states(TECHNIQUES["fused"], machine) if s["unsupported"] is None}
    # Attention in fp8 is cuDNN's.
    assert set(row["recipes"]) == allowed - {"fused(fp8, attention=fp8)"}
    assert row["failures"] == {}
    assert row["most_shared_memory"] <= row["shared_memory_limit"] == shared_memory_bytes(capability)
    is_measured = capability == (9, 0)
    assert compiled_recipes(capability) == (set() if is_measured else set(row["recipes"]))
