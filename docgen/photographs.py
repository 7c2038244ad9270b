"""The page on what witnesses see on photographs, from the record of `benchmarks.photographs`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vivace.answers.markdown import markdown_lines
from vivace.measure.damage import DAMAGE, HARMLESS

WITNESSES = (
    "match",
    "PSNR",
    "SSIM",
    "sharpness",
    "noise",
    "contrast",
    "brightness",
    "saturation",
    "colourfulness",
    "colours",
    "shapes",
    "tiny-clip",
)
"""In the order of the columns."""
LIMITED = ("match", "sharpness", "noise", "contrast", "brightness", "saturation")
"""Those that have a limit."""
_BLIND = "–"


def page(note: str, record: Path) -> str:
    result = json.loads(record.read_text(encoding="utf-8"))
    rows = {(row["damage"], row["witness"]): row for row in result["rows"]}
    return note + "\n".join(
        [
            "# What witnesses see on photographs",
            "",
            *_introduction(result),
            "",
            "## In one pair of images",
            "",
            *_table(rows, "single"),
            "",
            "## In a run of 39 pairs",
            "",
            "The mean over the pairs decides, so weaker damage is seen.",
            "",
            *_table(rows, "run"),
            "",
            "## What fails the limits",
            "",
            "A witness sees more than its limit forbids. These strengths are beyond the limits in a run of 39 pairs: a "
            "mean `match` under 0.9 (the gate's, where the image must be kept), and the margins of `vivace prove`. "
            "What has – everywhere passes them all.",
            "",
            *_table(rows, "limit", LIMITED),
            "",
            "## What the damage and the harmless changes are",
            "",
            *markdown_lines(
                ("damage", "like", "unit", "strengths"),
                [
                    (kind.name, kind.like, kind.unit, ", ".join(f"{s:g}" for s in kind.strengths))
                    for kind in DAMAGE
                ],
            ),
            "",
            f"Harmless are: {', '.join(change.name for change in HARMLESS)}. *Rounding* is noise of half a grey level, "
            "*other arithmetic* smooth noise of one. A large model in another dtype draws images that differ more; "
            "`vivace bench` measures that as the noise floor.",
            "",
            "## The photographs",
            "",
            *markdown_lines(
                ("photograph", "package", "licence", "crops"),
                [
                    (p["name"], f"`{p['package']}`: {p['file']}", p["licence"], str(p["crops"]))
                    for p in result["photographs"]
                ],
            ),
            "",
        ]
    )


def _introduction(result: dict[str, Any]) -> list[str]:
    crops = sum(p["crops"] for p in result["photographs"])
    captions = result["captions"]
    return [
        "From which strength on each figure of `vivace bench` and `vivace prove` sees damage, measured on "
        f"{crops} crops of {len(result['photographs'])} photographs that Python packages ship ({result['sizes'][0]} to "
        f"{result['sizes'][-1]} pixels a side). [Image quality](quality.md) says what the figures are.",
        "",
        "A crop is compared with itself after damage. A witness sees it if its value is beyond 95 % of its values for "
        "each harmless change (5 % false alarms); the tables have the strength that it sees in 90 % of cases, with a "
        "90 % interval over the photographs. ≤ is the lowest strength that was tried, – means that the highest is not "
        f"seen. {' and '.join(result['slow'])} looked at {result['slow_crops']} of the crops. "
        "[Record](../results/photographs-witnesses.json); `python -m benchmarks.photographs`.",
        "",
        _faults(result["faults"]),
        "",
        f"**`tiny-clip` is no judge of photographs.** It was trained on coloured shapes: asked which of "
        f"{len(result['photographs'])} captions belongs to a crop, it is right in {100 * captions['right']:.0f} % of "
        f"cases (chance: {100 * captions['chance']:.0f} %), and its margin is {captions['margin']:+.1f} ± "
        f"{captions['margin_error']:.1f} points. The last column is only the distance between its embeddings.",
    ]


def _table(
    rows: dict[tuple[str, str], dict[str, Any]], what: str, witnesses: Sequence[str] = WITNESSES
) -> list[str]:
    lines = [f"| damage | {' | '.join(witnesses)} |", "|" + " --- |" * (len(witnesses) + 1)]
    for kind in DAMAGE:
        cells = [_cell(rows[kind.name, witness][what], kind.strengths[0]) for witness in witnesses]
        lines.append(f"| {kind.name}, {kind.unit} | {' | '.join(cells)} |")
    return lines


def _cell(least: dict[str, float | None], lowest: float) -> str:
    strength, low, high = least["strength"], least["low"], least["high"]
    if strength is None:
        return _BLIND if low is None else f"{_BLIND} ({low:g} to {_BLIND})"
    if strength <= lowest and high is not None and high <= lowest:
        return f"≤ {strength:g}"
    return f"{strength:.2g} ({_end(low)} to {_end(high)})"


def _end(value: float | None) -> str:
    return _BLIND if value is None else f"{value:.2g}"


def _faults(counts: dict[str, dict[str, int]]) -> str:
    """Say how often the detectors of broken images are right."""
    total = sum(counts["crops"].values())
    alarms = total - counts["crops"].get("none", 0)
    right = [f"{counts[fault].get(fault, 0)} that are {fault}" for fault in ("black", "flat", "noise")]
    return (
        f"The detectors of broken images call {alarms} of the {total} crops broken; of {total} each they name "
        f"{', '.join(right)}."
    )
