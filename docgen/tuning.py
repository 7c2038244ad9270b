"""The table of docs/tuning.md: how near each way of searching comes to the best recipe of recorded grids."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from vivace.answers.markdown import markdown_lines

START, END = "<!-- replay -->", "<!-- end -->"
_GOAL = 0.02
_NAMES = {"model": "`model`", "tpe": "`tpe` (Optuna)", "greedy": "one at a time", "random": "`random`"}
_TEXT = """
Grids of recipes were measured one by one; a replay lets each way of searching ask for recipes, and answers from the
record (`python -m benchmarks.tuner`). The figure is how much slower the proposal is than the grid's best recipe that
passes the gate, in percent: the median of {seeds} seeds, after so many trials. A search without a proposal counts as
the baseline.

{table}

{published}

{gate}

*What is held out.* The grids of the embedded models are from a shared two-core CPU, where a single round is 8 % off
(standard deviation; now and then 30 %), and the best of a hundred single rounds is mostly luck. So the recipes that
pass were timed again in 16 interleaved rounds; on tiny-sd the six fastest in 16 more, and what fails in four, since one
slow round of it told every search that it gains nothing. What the machine did to the others in a round is taken out of
each recipe's. The search sees every second round, and the others say how fast recipes are. The best recipe is the best
by the held-out rounds, and the best by the rounds that a search may see is the same. With three rounds each it was not:
on tiny-flux the best by one half was 17 % off by the other.
FLUX.1 [dev]'s grid is of one H200 with one round a recipe, to which noise is added; vivace's own records, of which it
consists, are kept from the search.

*Whose quality is known.* Ten prompts leave most verdicts unclear, so what passed was partly chance, and so it is with
39 images: of tiny-sd's recipes that differ in rounding alone, five passed, by 0.003 at most, and the sixth missed,
twice. The 95 that had not failed are now judged by 156 images, twelve seeds of each prompt: of 62 that were unclear
26 pass and 6 fail, and recipes that differ in rounding or in the decoder alone have one verdict. The fastest that
pass are of those: `deepcache(2)` keeps 92 % of the CLIP margin, eight steps keep 96 %, and both together with
guidance that ends at 40 % keep 99.8 %. Of tiny-flux 48 recipes are judged by 39 images; slower ones still have the
verdict of ten prompts, scored by one view and held to that scorer's limit.

*Where the goal is met.* It is 2 % in a tenth of the trials, as the median of five seeds, which depends on the seeds:

{fives}
"""


def filled(page: str, record: Path) -> str:
    """Return the page with its table made from the record."""
    before, rest = page.split(START, 1)
    _, after = rest.split(END, 1)
    grids: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    text = _TEXT.strip().format(
        seeds=_num_seeds(grids),
        table=_table(grids),
        published=_published(grids),
        gate=_gate(grids),
        fives="\n".join(_fives(name, grid) for name, grid in grids.items()),
    )
    return f"{before}{START}\n{text}\n{END}{after}"


def _table(grids: dict[str, Any]) -> str:
    lines = []
    for name, grid in grids.items():
        trials = list(grid["samplers"]["model"]["median_regret"])
        lines += [
            f"**{name}**: {grid['recipes']} recipes, {grid['allowed']} allowed; "
            f"the best is {grid['best_speedup']:.2f}x, `{grid['best']}`.",
            "",
        ]
        rows = [
            _cells(_NAMES[sampler], figures["median_regret"], trials)
            for sampler, figures in grid["samplers"].items()
        ]
        model = grid["samplers"]["model"]
        by_all_rounds = []
        if model["median_by_all_rounds"] != model["median_regret"]:
            rows.append(_cells("`model`, by all rounds", model["median_by_all_rounds"], trials))
            by_all_rounds = [
                "",
                f"The best of all {grid['recipes']} recipes by every round that a search may see is "
                f"{100 * grid['least_regret']:.1f} % off by the rounds held out.",
            ]
        headings = ("way", *(f"{number} trials" for number in trials))
        lines += [*markdown_lines(headings, rows), *by_all_rounds, ""]
    return "\n".join(lines).strip()


def _cells(name: str, regret: dict[str, float], trials: list[str]) -> list[str]:
    return [name, *(f"{100 * regret[number]:.1f} %" for number in trials)]


def _gate(grids: dict[str, Any]) -> str:
    """Say how many proposals fail the gate where finals draw other images than the record's."""
    gates = [grid["gate"] for grid in grids.values() if "gate" in grid]
    runs, proposed = (sum(gate[name] for gate in gates) for name in ("runs", "proposed"))
    failed = sum(gate["failed"] for gate in gates)
    below = sum(len(gate["mean_below_limit"]) for gate in gates)
    return (
        f"In {runs} searches whose finals draw other images than the record's (39, with its spread), {proposed} end "
        f"with a proposal; {failed} of these fail the record's gate, and of {below} the record's mean is below the "
        "limit."
    )


def _num_seeds(grids: dict[str, Any]) -> int:
    return len(next(iter(next(iter(grids.values()))["samplers"]["model"]["regret"].values())))


def _fives(name: str, grid: dict[str, Any]) -> str:
    """Say what five seeds after the other reach in a tenth of the trials, and what all reach on average."""
    trials, regret = list(grid["samplers"]["model"]["regret"].items())[1]
    medians = [statistics.median(regret[k : k + 5]) for k in range(0, len(regret), 5)]
    within = sum(value <= _GOAL for value in regret)
    return (
        f"- {name}, {trials} trials: five by five {', '.join(f'{100 * median:.1f}' for median in medians)} %; "
        f"{within} of {len(regret)} searches are within 2 %, and on average they are "
        f"{100 * statistics.mean(regret):.0f} % off."
    )


def _published(grids: dict[str, Any]) -> str:
    """Say how far recipes that published studies picked by hand are from the best."""
    listed = [
        f"`{recipe}` {100 * regret:.0f} % on {name}"
        for name, grid in grids.items()
        for recipe, regret in sorted(grid["seeds_recipes"].items(), key=lambda item: item[1])[:3]
    ]
    if not listed:
        return "No grid has a recipe that a published study picked for its model."
    return f"Recipes that published studies picked by hand: {'; '.join(listed)}."
