"""The start of a saved recipe beside the recipe applied afresh: rows and what is compared."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import saved_start as starts


def test_both_sides_start_in_turns_and_the_best_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    ready = iter([20.0, 8.0, 9.0, 22.0])

    def start_of(side: str, *_: Any) -> dict[str, Any]:
        order.append(side)
        return {"ready_s": next(ready), "imports_s": 5.0, "first_image_s": 30.0, "host_bytes": 2_000_000_000}

    for name in ("write_model", "save_recipe"):
        monkeypatch.setattr(starts, name, lambda *_: None)
    monkeypatch.setattr(starts, "start_of", start_of)
    monkeypatch.setattr(starts, "drop_from_cache", lambda folder: order.append(f"dropped {folder.name}"))
    record = tmp_path / "record.json"
    arguments = [
        "synthetic:flux-dev",
        "--folder",
        str(tmp_path),
        "--record",
        str(record),
        "--device",
        "cpu",
        "--cold",
    ]
    result = CliRunner().invoke(starts.saved_start, arguments, catch_exceptions=False)
    sides = ("afresh", "saved", "saved", "afresh")
    assert order == [step for side in sides for step in (f"dropped {side}", side)]
    assert "a saved recipe is ready in 0.40 of the time" in result.output
    assert json.loads(record.read_text())["is_cold"]
    assert [row["ready_s"] for row in json.loads(record.read_text())["starts"]["saved"]] == [8.0, 9.0]
