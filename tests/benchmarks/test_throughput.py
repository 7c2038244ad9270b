"""The page of images a second tells what its records hold."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.technique_cases import RESULTS
from docgen import throughput

RECORD = RESULTS / "throughput-h200.json"


def test_each_measured_case_is_a_row_with_its_images_a_second(tmp_path: Path) -> None:
    cases = json.loads(RECORD.read_text(encoding="utf-8"))
    for case in cases:
        for measured_round in case["rounds"]:
            for sample in measured_round["samples"]:
                sample["total_s"] = 2.0
    cases[0]["rounds"][0] |= {"outcome": "crashed", "reason": "a test", "samples": []}
    (tmp_path / RECORD.name).write_text(json.dumps(cases), encoding="utf-8")
    rows = [
        line.split(" | ")
        for line in throughput.page("", tmp_path).splitlines()
        if f"](../../results/{RECORD.name}" in line
    ]
    measured = [case["trial"]["workload"]["batch"] for case in cases[1:]]
    assert sorted(int(row[2]) for row in rows) == sorted(measured)
    assert all(float(row[3].split()[0]) == float(f"{int(row[2]) / 2:.3g}") for row in rows)
    assert all(row[4] == "2" for row in rows)
