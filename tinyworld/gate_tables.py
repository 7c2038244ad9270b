"""Counts of the gate's verdicts, the tables of docs/quality.md and docs/quality-variants.md, the README's sentence."""

import argparse
import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinyworld.gate_variants import MOST_PICTURES, SET_PICTURES
from vivace.foundation.stats import Gate

ROOT = Path(__file__).parents[1]
RECORD, PAGE = ROOT / "results/quality-gate.json", ROOT / "docs/quality.md"
VARIANTS = ROOT / "docs/quality-variants.md"
ROWS = ROOT / "results/quality-gate-variants.csv"
LABELS, HALVES = ("ruined", "between", "good"), (
    "held out", "later", "newest", "calibrated", "later, calibrated",
)  # fmt: skip
UNSEEN = ("held out", "later", "newest")
"""The halves on which nothing was chosen; docs/quality.md says which of them were seen while choosing."""
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
    wordings = {
        "ruined": "ruined: falls by 10 points or more",
        "between": "between: falls by 2 to 10 points",
        "good": "good: falls by under 2 points",
    }
    for half in HALVES:
        for number in NUMBERS:
            for label in LABELS:
                counts = result["tally"][str(number)][half][label]
                cells = [half, str(number), wordings[label], str(sum(counts.values()))]
                cells += [str(counts[gate]) for gate in ("failed", "unclear", "passed")]
                lines.append("| " + " | ".join(cells) + " |")
    wordings = ". ".join(headline(result, number) for number in (SET_PICTURES, MOST_PICTURES))
    return "\n".join([*lines, "", f"{wordings} (scorer `{result['scorer']}`)."])


def headline(result: dict[str, Any], number: int = SET_PICTURES) -> str:
    """Say how often the gate is right on kinds that nothing was chosen on, from so many images."""
    ruined, good = unseen(result, number)
    fails, passes = ruined["failed"] / sum(ruined.values()), good["passed"] / sum(good.values())
    return (
        f"{', '.join(UNSEEN).capitalize()} together, {number} images: of {sum(ruined.values())} ruined "
        f"{100 * fails:.1f} % fail and {ruined['passed']} pass; of {sum(good.values())} good {100 * passes:.1f} % pass "
        f"and {good['failed']} fail"
    )


def unseen(result: dict[str, Any], number: int = SET_PICTURES) -> tuple[dict[str, int], dict[str, int]]:
    """Return the counts of the ruined and of the good, by verdict, over UNSEEN."""
    counts = [result["tally"][str(number)][half] for half in UNSEEN]
    ruined, good = (
        {gate: sum(c[label][gate] for c in counts) for gate in GATES} for label in ("ruined", "good")
    )
    return ruined, good


def readme_claim(result: dict[str, Any]) -> str:
    """Return the README's sentence on how often the gate is right."""
    ruined, good = unseen(result)
    fails = 100 * ruined["failed"] / sum(ruined.values())
    passes = 100 * good["passed"] / sum(good.values())
    worst, of_more = 100 * held_out_failing(result), 100 * held_out_failing(result, MOST_PICTURES)
    none = "passes none" if ruined["passed"] == 0 else f"passes {ruined['passed']}"
    return (
        f"On kinds of damage that no limit was chosen on it fails {fails:.0f} % of the ruined "
        f"({worst:.0f} % of those held out first, {of_more:.0f} % from {MOST_PICTURES} images) and {none}, and passes "
        f"{passes:.0f} % of the good, from {SET_PICTURES} images"
    )


def held_out_failing(result: dict[str, Any], number: int = SET_PICTURES) -> float:
    """Return the share of the ruined that fail in the part that was held out first, where the gate is at its worst."""
    counts = result["tally"][str(number)]["held out"]["ruined"]
    return float(counts["failed"] / sum(counts.values()))


def kinds_table(result: dict[str, Any]) -> str:
    """Return how often the gate is right by kind of variant and model, of kinds that nothing was chosen on."""
    rows = [row for row in result["rows"] if row["half"] in UNSEEN]
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = ["| " + " | ".join(["kind", "half", *models, "all"]) + " |", "|" + " --- |" * (len(models) + 3)]
    kinds = sorted({(UNSEEN.index(row["half"]), row["kind"]) for row in rows})
    for half, kind in kinds:
        of_kind = [row for row in rows if row["kind"] == kind]
        cells = [right_of([row for row in of_kind if row["model"] == model]) for model in models]
        lines.append("| " + " | ".join([kind, UNSEEN[half], *cells, right_of(of_kind)]) + " |")
    cells = [right_of([row for row in rows if row["model"] == model]) for model in models]
    lines.append("| " + " | ".join(["**all**", "", *cells, right_of(rows)]) + " |")
    return "\n".join(lines)


def right_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return e.g. "ruined 7/8, good 3/3": how many ruined fail and good pass; with what is worse than unclear."""
    parts = []
    for label, right, wrong in (("ruined", "failed", "passed"), ("good", "passed", "failed")):
        verdicts = [row[str(SET_PICTURES)] for row in rows if row["label"] == label]
        if verdicts:
            worse = verdicts.count(wrong)
            parts.append(
                f"{label} {verdicts.count(right)}/{len(verdicts)}" + (f" ({worse} {wrong})" if worse else "")
            )
    return ", ".join(parts) or "–"


def rows_csv(result: dict[str, Any]) -> str:
    """Return every variant with its verdicts as CSV, the least fall first."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["model", "variant", "held_to", "half", "fall_points", *map(str, NUMBERS), "why_of_39"])
    for row in sorted(result["rows"], key=lambda row: row["fall"]):
        verdicts = [row.get(str(number), "") for number in NUMBERS]
        held_to = row["held_to"].replace("picture", "image")
        fall = f"{100 * row['fall']:.1f}"
        writer.writerow([row["model"], row["variant"], held_to, row["half"], fall, *verdicts, row["why"]])
    return text.getvalue()


def filled(page: str, result: dict[str, Any]) -> str:
    """Fill the page's table from the record."""
    return replaced(page, "gate summary", summary_table(result))


def variants_page(result: dict[str, Any]) -> str:
    """Return the page of all variants as Markdown."""
    return f"""<!-- generated by `python -m tinyworld.calibrate_gate table`; edit the code instead -->

# The gate, kind by kind

How [the quality gate](quality.md#how-good-the-gate-is) judged the kinds of variants that it was measured on. From
[the record](../results/quality-gate.json); [every variant with its verdicts](../results/quality-gate-variants.csv) is a
table of its own.

Of the parts on which nothing was chosen, 39 images: how many ruined variants fail, and how many good ones pass. Where
less than all do, the others are `unclear` unless it says otherwise. Recipes are the kinds `steps`, `guidance`,
`decoder`, `scheduler`, `cache hits`, `merging` and `pruning`; the other kinds are damage done to weights or images.

{kinds_table(result)}
"""


def replaced(page: str, name: str, text: str) -> str:
    """Fill `<!-- NAME -->` ... `<!-- end -->` of a page."""
    before, rest = page.split(f"<!-- {name} -->\n")
    return f"{before}<!-- {name} -->\n{text}\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}"


def write_tables(args: argparse.Namespace) -> None:
    result = json.loads(RECORD.read_text(encoding="utf-8"))
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")
    VARIANTS.write_text(variants_page(result), encoding="utf-8")
    ROWS.write_text(rows_csv(result), encoding="utf-8")
