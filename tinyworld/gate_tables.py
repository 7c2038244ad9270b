"""Counts of the gate's verdicts, and the tables of docs/quality.md and the README's sentence."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinyworld.gate_variants import SET_PICTURES
from vivace.stats import Gate

ROOT = Path(__file__).parents[1]
RECORD, PAGE = ROOT / "results/quality-gate.json", ROOT / "docs/quality.md"
LABELS, HALVES = ("ruined", "between", "good"), ("calibrated", "held out", "later")
GATES = tuple(gate.value for gate in Gate)
NUMBERS = (13, 39, 100)


def tally(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count the verdicts by number of images, half and label."""
    return {
        str(number): {
            half: {
                label: {
                    gate: sum(
                        row.get(str(number)) == gate and row["half"] == half and row["label"] == label
                        for row in rows
                    )
                    for gate in GATES
                }
                for label in LABELS
            }
            for half in HALVES
        }
        for number in NUMBERS
    }


def summary_table(result: dict[str, Any]) -> str:
    """Return a table of the gate's verdicts by half, number of images and label."""
    lines = ["| half | images | truth | variants | failed | unclear | passed |", "|" + " --- |" * 7]
    told = {
        "ruined": "ruined: falls by 10 points or more",
        "between": "between: falls by 2 to 10 points",
        "good": "good: falls by under 2 points",
    }
    for half in ("held out", "later", "calibrated"):
        for number in NUMBERS:
            for label in LABELS:
                counts = result["tally"][str(number)][half][label]
                cells = [half, str(number), told[label], str(sum(counts.values()))]
                cells += [str(counts[gate]) for gate in ("failed", "unclear", "passed")]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"{headline(result)} (scorer `{result['scorer']}`)."])


def headline(result: dict[str, Any]) -> str:
    """Say how often the gate is right on the held-out half, from the prompt set's 39 images."""
    counts = result["tally"][str(SET_PICTURES)]["held out"]
    ruined, good = counts["ruined"], counts["good"]
    fails, passes = ruined["failed"] / sum(ruined.values()), good["passed"] / sum(good.values())
    return (
        f"Held out, {SET_PICTURES} images: of {sum(ruined.values())} ruined {100 * fails:.1f} % fail and "
        f"{ruined['passed']} pass; of {sum(good.values())} good {100 * passes:.1f} % pass and {good['failed']} fail"
    )


def readme_claim(result: dict[str, Any]) -> str:
    """Return the README's sentence on how often the gate is right."""
    counts = result["tally"][str(SET_PICTURES)]["held out"]
    ruined, good = counts["ruined"], counts["good"]
    fails = 100 * ruined["failed"] / sum(ruined.values())
    passes = 100 * good["passed"] / sum(good.values())
    none = "passes none" if ruined["passed"] == 0 else f"passes {ruined['passed']}"
    return (
        f"On kinds of damage that no limit was chosen on it fails {fails:.0f} % of the ruined and {none}, and passes "
        f"{passes:.0f} % of the good, from {SET_PICTURES} images"
    )


def rows_table(result: dict[str, Any]) -> str:
    headings = ["model", "variant", "held to", "half", "fall, points", "13", "39", "100", "why, of 39"]
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    for row in sorted(result["rows"], key=lambda row: row["fall"]):
        verdicts = [row.get(str(number), "–") for number in NUMBERS]
        cells = [row["model"], f"`{row['variant']}`", row["held_to"], row["half"], f"{100 * row['fall']:.1f}"]
        lines.append("| " + " | ".join([*cells, *verdicts, row["why"]]) + " |")
    return "\n".join(lines)


def filled(page: str, result: dict[str, Any]) -> str:
    """Fill the page's two tables from the record."""
    for name, make in (("gate summary", summary_table), ("gate rows", rows_table)):
        before, rest = page.split(f"<!-- {name} -->\n")
        page = f"{before}<!-- {name} -->\n{make(result)}\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}"
    return page


def write_tables(args: argparse.Namespace) -> None:
    PAGE.write_text(filled(PAGE.read_text(), json.loads(RECORD.read_text())))
