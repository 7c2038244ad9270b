"""The table of docs/tuning.md: how near each way of searching comes to the best recipe of recorded grids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

START, END = "<!-- replay -->", "<!-- end -->"
_NAMES = {"model": "`model`", "tpe": "`tpe` (Optuna)", "greedy": "one at a time", "random": "`random`"}
_TEXT = """
Grids of recipes were measured one by one; a replay lets each way of searching ask for recipes, and answers from the
record with noise (`python -m benchmarks.tuner`). The figure is how much slower the proposal is than the grid's best
recipe that passes the gate, in percent: the median of five seeds, after so many trials.

{table}

{seeds}

*The grids of the embedded models were recorded on a shared two-core CPU, with ten prompts: times of recipes that should
be alike differ by up to a third there, and most verdicts are unclear, so which recipe is the best is partly chance.
What the table shows for sure is the order of the ways. FLUX.1 [dev]'s grid is of one H200; vivace's own records, of
which it consists, are kept from the search.*
"""


def filled(page: str, record: Path) -> str:
    """Return the page with its table made from the record."""
    before, rest = page.split(START, 1)
    _, after = rest.split(END, 1)
    grids: dict[str, Any] = json.loads(record.read_text())
    text = _TEXT.strip().format(table=_table(grids), seeds=_seeds(grids))
    return f"{before}{START}\n{text}\n{END}{after}"


def _table(grids: dict[str, Any]) -> str:
    lines = []
    for name, grid in grids.items():
        trials = list(grid["samplers"]["model"]["median_regret"])
        share = ", ".join(f"{number} trials" for number in trials)
        lines += [
            f"**{name}**: {grid['recipes']} recipes, {grid['allowed']} allowed; "
            f"the best is {grid['best_speedup']:.2f}x, `{grid['best']}`.",
            "",
            f"| way | {share.replace(', ', ' | ')} |",
            "| --- |" + " --- |" * len(trials),
        ]
        for sampler, found in grid["samplers"].items():
            cells = (f"{100 * found['median_regret'][number]:.1f} %" for number in trials)
            lines.append(f"| {_NAMES[sampler]} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines).strip()


def _seeds(grids: dict[str, Any]) -> str:
    """Say how far recipes that published studies picked by hand are from the best."""
    found = [
        f"`{recipe}` {100 * regret:.0f} % on {name}"
        for name, grid in grids.items()
        for recipe, regret in sorted(grid["seeds_recipes"].items(), key=lambda one: one[1])[:3]
    ]
    if not found:
        return "No grid has a recipe that a published study picked for its model."
    return f"Recipes that published studies picked by hand: {'; '.join(found)}."
