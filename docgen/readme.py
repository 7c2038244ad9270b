"""The tables of the README and of docs/start.md: what is fastest, what each card draws, and what the demo shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vivace
from docgen import fastest
from docgen.fastest import Measurement
from vivace.answers.formatting import plus_minus, ratio, seconds, size
from vivace.answers.markdown import markdown_lines
from vivace.foundation.stats import Interval

DEMO, FASTEST, CARDS = "<!-- table demo -->", "<!-- table fastest -->", "<!-- table cards -->"
END = "<!-- end -->"
MODELS = {
    "sdxl": "SDXL, 50 steps",
    "sd35-large": "SD 3.5 Large, 28 steps",
    "flux-dev": "FLUX.1 [dev], 28 steps",
    "flux2-klein-4b": "FLUX.2 [klein] 4B, 4 steps",
    "flux2-dev": "FLUX.2 [dev], 50 steps",
    "z-image-turbo": "Z-Image-Turbo, 9 steps",
    "krea-2-raw": "Krea 2 Raw, 28 steps",
    "qwen-image-2512": "Qwen-Image-2512, 50 steps",
}
"""The full-size models whose fastest known recipe the README names, on `CARD`."""
CARD = "NVIDIA H200"
GPUS = ("RTX 4060", "RTX 3060 12GB", "RTX 4060 Ti 16GB", "RTX 4090", "H100")
"""A usual card of each size."""
OF_CARDS = {
    "flux2-klein-4b": "FLUX.2 [klein] 4B",
    "sdxl": "SDXL",
    "flux-dev": "FLUX.1 [dev]",
    "z-image-turbo": "Z-Image-Turbo",
}
_DEMO_HEADINGS = (
    "recipe",
    "s/image",
    "speed-up [95 % interval]",
    "verdict",
    "quality",
    "PSNR dB, worst",
    "peak memory",
)


def filled(text: str, measurements: Sequence[Measurement]) -> str:
    """Return the README with its tables.

    Args:
        measurements: what all records say of full-size models.
    """
    text = _with(text, FASTEST, "\n".join(_fastest_table(measurements)))
    return _with(text, CARDS, "\n".join(_cards_table()))


def with_demo(text: str, demo: Path) -> str:
    """Return docs/start.md with the table of what `vivace bench --format json` wrote."""
    rows = map(_demo_row, json.loads(demo.read_text(encoding="utf-8")))
    return _with(text, DEMO, "\n".join(markdown_lines(_DEMO_HEADINGS, rows)))


def _fastest_table(measurements: Sequence[Measurement]) -> list[str]:
    rows = []
    for row in fastest.fastest_known(measurements, list(MODELS)):
        if row.best.card != CARD or row.baseline is None or row.best.gain is None:
            continue
        before, after = (
            f"{seconds(measured.latency.point)}, {size(measured.peak_bytes or 0)}"
            for measured in (row.baseline, row.best)
        )
        times = f"[{row.best.gain.point:.2f}]({row.best.record})"
        rows.append((MODELS[row.best.model], CARD.removeprefix("NVIDIA "), before, after, times))
    return markdown_lines(("model", "card", "before", "after", "times as fast"), rows)


def _cards_table() -> list[str]:
    """Return a row for each card: what `vivace recommend` says of each model, measured on such a card or predicted."""
    rows = [(gpu, *(_on_card(model, gpu) for model in OF_CARDS)) for gpu in GPUS]
    return markdown_lines(("card", *OF_CARDS.values()), rows)


def _on_card(model: str, gpu: str) -> str:
    answer = vivace.recommend(model, gpu=gpu, same_picture=True)
    chosen = answer.chosen
    if chosen is None or chosen.latency is None:
        return "does not fit" if chosen is None else "not known"
    time = seconds(chosen.latency.point)
    return time if chosen.predicted_from else f"**{time}**"


def _with(text: str, start: str, table: str) -> str:
    before, rest = text.split(start, 1)
    _, after = rest.split(END, 1)
    return f"{before}{start}\n{table}\n{END}{after}"


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
