"""The tables of the README: the fastest known recipes, what `vivace tune` found, and what the demo shows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from docgen import fastest
from docgen.fastest import Measurement
from vivace.answers.formatting import clock, plus_minus, ratio, seconds, size
from vivace.foundation.stats import Interval

DEMO, FASTEST, TUNED = "<!-- table demo -->", "<!-- table fastest -->", "<!-- table tuned -->"
END = "<!-- end -->"
MODELS = (
    *("sdxl", "flux-dev", "flux2-klein-4b", "flux2-klein-9b", "z-image-turbo", "flux2-dev"),
    *("qwen-image-2.1", "qwen-image-2512"),
)
"""The full-size models whose fastest known recipe the README names."""
_DEMO_HEADINGS = (
    "recipe",
    "s/image",
    "speed-up [95 % interval]",
    "verdict",
    "quality",
    "PSNR dB, worst",
    "peak memory",
)
_TUNED_HEADINGS = ("model", "on", "as published", "found", "times as fast [95 % interval]", "searched for")


def filled(text: str, demo: Path, searches: Sequence[Path], measurements: Sequence[Measurement]) -> str:
    """Return the README with its tables.

    Args:
        demo: what `vivace bench --format json` wrote.
        searches: what `vivace tune --format json` wrote.
        measurements: what all records say of full-size models.
    """
    rows = fastest.table(fastest.fastest_known(measurements, MODELS), top="")
    text = _with(text, FASTEST, "\n".join(rows))
    text = _with(
        text, TUNED, tuned_table([json.loads(path.read_text(encoding="utf-8")) for path in searches])
    )
    return _with(
        text, DEMO, _table(_DEMO_HEADINGS, map(_demo_row, json.loads(demo.read_text(encoding="utf-8"))))
    )


def _with(text: str, start: str, table: str) -> str:
    before, rest = text.split(start, 1)
    _, after = rest.split(END, 1)
    return f"{before}{start}\n{table}\n{END}{after}"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _demo_row(row: dict[str, Any]) -> list[str]:
    latency, speedup = row["latency"], row["speedup"]
    picture = "-"
    if speedup is not None and row["fidelity"] is not None:
        picture = f"{row['fidelity']['psnr_db']['mean']:.1f}, {row['fidelity']['worst_psnr_db']:.1f}"
    return [
        f"`{row['recipe']}`",
        plus_minus(Interval(latency["median_s"], *latency["ci95_s"])),
        "1" if speedup is None else _ratio(speedup),
        "baseline" if speedup is None else speedup["verdict"],
        (row["quality"] or {}).get("verdict") or "-",
        picture,
        size(row["memory"]["peak_bytes"]),
    ]


def _ratio(speedup: dict[str, Any]) -> str:
    return ratio(Interval(speedup["ratio"], *(speedup["ci95"] or (None, None))))


def tuned_table(searches: Sequence[dict[str, Any]]) -> str:
    """Return a row for each search that found something."""
    return _table(_TUNED_HEADINGS, [_tuned_row(search) for search in searches if search["pick"] is not None])


def _tuned_row(search: dict[str, Any]) -> list[str]:
    rows = {row["recipe"]: row for row in search["final"]}
    (baseline,) = [row for row in search["final"] if row["is_baseline"]]
    pick = rows[search["recipe"]]
    limit = search["limits"]["max_memory_bytes"]
    return [
        search["model"].removeprefix("synthetic:") + ("" if limit is None else f", in {limit / 1e9:g} GB"),
        search["device"].removeprefix("NVIDIA "),
        *(
            f"{seconds(r['latency']['median_s'])}, {size(r['memory']['peak_bytes'])}"
            for r in (baseline, pick)
        ),
        _ratio(pick["speedup"]),
        clock(search["seconds"]),
    ]
