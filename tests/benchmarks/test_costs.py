"""Tables of LoRAs and sizes: a row a case, and a GPU's own table as soon as it has a record."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import lora, sizes
from benchmarks.command import record_on
from docgen import costs


@pytest.mark.parametrize(("module", "start"), [(lora, "<!-- lora -->"), (sizes, "<!-- sizes -->")])
def test_a_gpu_has_a_table_of_its_own(
    module: object, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "record.jsonl"
    shutil.copy(module.RECORD, record)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "RECORD", record)
    fill = costs.loras if module is lora else costs.compiling
    page = fill(f"Before.\n{start}\nold\n<!-- end -->\nAfter.")
    assert page.startswith("Before.\n")
    assert page.endswith("<!-- end -->\nAfter.")
    assert "old" not in page
    assert page.count("One core of a CPU") == page.count("No GPU has been measured yet.") == 1
    cases = [json.loads(text) for text in record.read_text().splitlines()]
    assert page.count("\n| tiny-") == len(cases)
    on_gpu = cases[0] | {"model": "synthetic:sdxl", "clock": "perf_counter"}
    on_gpu["environment"] = on_gpu["environment"] | {"device": "cuda", "device_name": "Test GPU"}
    record_on(record, "cuda").write_text(json.dumps(on_gpu) + "\n")
    page = fill(page)
    assert "No GPU" not in page
    assert "Test GPU, torch" in page
    assert page.count("\n| tiny-") == len(cases)
    assert page.count("\n| sdxl | ") == 1
    assert "[Record](../results/record-cuda.jsonl)." in page


def test_each_device_has_a_record() -> None:
    assert record_on(Path("results/lora.jsonl"), "cpu") == Path("results/lora.jsonl")
    assert record_on(Path("results/lora.jsonl"), "cuda") == Path("results/lora-cuda.jsonl")
