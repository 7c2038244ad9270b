"""What docs/hardware.md says of small cards: what `vivace plan --card` answers, and whether it ran under a cap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.memory_caps import key_of, read_rows
from vivace.answers.formatting import seconds, size
from vivace.answers.markdown import markdown_lines
from vivace.evidence.recommendation.predicted import BY_OPERATIONS


def section(answers: Path, runs: Path) -> list[str]:
    """Return the page's section.

    Args:
        answers: the record of `python -m benchmarks.memory_caps --plan`.
        runs: that of the runs under a cap, which need not exist.
    """
    rows: list[dict[str, Any]] = json.loads(answers.read_text(encoding="utf-8"))
    ran = {key_of(row): row for row in read_rows(runs)}
    return [
        "## 8, 12, 16 and 24 GB",
        "",
        "What `vivace plan MODEL --card N` answers: the fastest that fits, at the model's own size and steps, text "
        f"encoders included ([record](../results/{answers.name})). *Time* is of an image on a usual card of that size, "
        "predicted from a record of the GPU that is named, or from the operations and copies alone, which may be wrong "
        "by a factor of 1.6 either way. *Under a cap* is a run on one GPU whose memory was limited to the card's, less "
        "the CUDA context (`python -m benchmarks.memory_caps`): what it took of the cap, and the time there.",
        "",
        *markdown_lines(
            ("model", "card, GB", "recipe", "peak, predicted", "time", "predicted from", "under a cap"),
            [_cells(row, ran.get(key_of(row))) for row in rows],
            {"card, GB": "right", "peak, predicted": "right"},
        ),
    ]


def _cells(row: dict[str, Any], run: dict[str, Any] | None) -> list[str]:
    origin = row["predicted_from"]
    time = "not known"
    if row["predicted_s"] is not None:
        at_most = "at most " if row["is_at_most"] else ""
        time = f"{at_most}{seconds(row['predicted_s'])} on {row['times_of']}"
    return [
        row["model"],
        str(row["card_gb"]),
        "nothing was seen to fit" if row["recipe"] is None else f"`{row['recipe']}`",
        "" if row["peak_bytes"] is None else size(row["peak_bytes"]),
        time,
        "operations" if origin == BY_OPERATIONS else origin or _measured(row),
        _run(run),
    ]


def _measured(row: dict[str, Any]) -> str:
    return f"measured there, {row['measured_in']}" if row.get("measured_in") else ""


def _run(run: dict[str, Any] | None) -> str:
    if run is None:
        return "not run"
    if run["outcome"] != "ran":
        return f"{run['outcome'].replace('_', ' ')}: {run['reason']}"
    took = f"{size(run['reserved_bytes'])} of {size(run['cap_bytes'])}"
    return f"{took}, {seconds(run['image_s'])} on {run['gpu']}"
