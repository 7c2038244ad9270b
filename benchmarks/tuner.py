"""Replay recorded grids: how near each way of searching comes to the best recipe.

    python -m benchmarks.tuner            every grid and sampler, five seeds; writes results/tuner-replay.json

A simulated machine answers from a record: screening is noisy, judging has a wider interval of quality, the final is the
record's own verdict. So a replay cannot tell how often a proposal would fail on other images. "Trials" are the
different recipes that were measured, the baseline not counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.command import run
from benchmarks.tuner_grids import RESULTS
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.spec.record import Outcome
from vivace.stats import Gate
from vivace.studies.file import published_studies, read_study
from vivace.tuning.priors import effects, known_sources
from vivace.tuning.samplers import Name, sampler_of
from vivace.tuning.search import Search, Trials
from vivace.tuning.seen import Rung, Seen
from vivace.tuning.space import FixedSpace
from vivace.tuning.wanted import Wanted

SAMPLERS: tuple[Name, ...] = ("model", "tpe", "greedy", "random")
NEAR = 0.02
_NOISE = {Rung.SCREENED: 0.05, Rung.JUDGED: 0.03, Rung.PROVEN: 0.005}
"""Standard deviation of a round's logarithm beside the samples' own spread; a final has several rounds."""
_FEWER_PROMPTS = 1.4  # a judgement by six prompts has a wider interval than the record's


@dataclass(frozen=True)
class Entry:
    """A recipe of a grid: seconds of its calls, and the verdict on its images; `slack` as in `Seen`."""

    recipe: Recipe
    outcome: Outcome
    seconds: tuple[float, ...] = ()
    peak_bytes: float | None = None
    first_call_s: float | None = None
    gate: Gate | None = None
    slack: float | None = None
    width: float = 0.0

    @property
    def median_s(self) -> float:
        return float(np.median(self.seconds))


@dataclass(frozen=True)
class Grid:
    """A recorded grid; the baseline is its first entry."""

    name: str
    device_name: str
    judged: bool
    entries: dict[Recipe, Entry]

    @property
    def baseline(self) -> Entry:
        return next(iter(self.entries.values()))

    @property
    def allowed(self) -> list[Entry]:
        """The recipes that were measured and whose quality passes."""
        return [
            entry
            for entry in self.entries.values()
            if entry.seconds and (not self.judged or entry.gate is Gate.PASSED or entry is self.baseline)
        ]

    @property
    def best(self) -> Entry:
        return min(self.allowed, key=lambda entry: entry.median_s)


def read_grid(path: Path) -> Grid:
    """Read a grid that `benchmarks.tuner_grids` wrote."""
    found = json.loads(path.read_text())
    entries = {}
    for row in found["rows"]:
        recipe = resolve(row["recipe"])
        times = tuple(s for samples in row.get("s", ()) for s in samples)
        slack = width = None
        for name, limit in (("clip", 0.99), ("match", 0.9)):
            if name in row and (name == "clip" or recipe.same_picture):
                low, point, _ = row[name]
                if slack is None or low - limit < slack:
                    slack, width = low - limit, point - low
        entries[recipe] = Entry(
            recipe,
            Outcome(row["outcome"]),
            times,
            row.get("peak"),
            row.get("first_call_s"),
            Gate(row["gate"]) if "gate" in row else None,
            slack,
            width or 0.0,
        )
    return Grid(found["model"], found["device_name"], found.get("judged", True), entries)


@dataclass
class Simulated:
    """A machine that answers from a grid, with noise."""

    grid: Grid
    rng: np.random.Generator
    _offsets: dict[tuple[Recipe, Rung], float] = field(default_factory=dict)

    def refuse(self, recipes: Sequence[Recipe]) -> list[Seen]:
        return []

    def screen(self, recipes: Sequence[Recipe]) -> list[Seen]:
        return [self._seen(recipe, Rung.SCREENED) for recipe in recipes]

    def judge(self, recipes: Sequence[Recipe]) -> list[Seen]:
        return [self._seen(recipe, Rung.JUDGED) for recipe in recipes]

    def prove(self, recipes: Sequence[Recipe]) -> list[Seen]:
        return [self._seen(recipe, Rung.PROVEN) for recipe in (self.grid.baseline.recipe, *recipes)]

    def _seen(self, recipe: Recipe, rung: Rung) -> Seen:
        entry = self.grid.entries[recipe]
        if not entry.seconds:
            return Seen(recipe, entry.outcome, rung, reason="as recorded")
        noise = _NOISE[rung]
        seconds = (
            float(np.median(self.rng.choice(entry.seconds, 3))) if rung < Rung.PROVEN else entry.median_s
        )
        gain = math.log(self.grid.baseline.median_s / seconds) + noise * float(self.rng.standard_normal())
        slack, gate = None, None
        if self.grid.judged and rung is Rung.PROVEN:
            slack, gate = entry.slack, entry.gate
        elif self.grid.judged and rung is Rung.JUDGED and entry.slack is not None:
            wider = (_FEWER_PROMPTS - 1) * entry.width
            slack = entry.slack - wider + 0.5 * entry.width * float(self.rng.standard_normal())
            gate = Gate.FAILED if entry.gate is Gate.FAILED else Gate.UNCLEAR if slack < 0 else Gate.PASSED
        if recipe.is_baseline:
            gain, slack, gate = 0.0, None, Gate.PASSED
        return Seen(
            recipe,
            Outcome.MEASURED,
            rung,
            gain,
            noise,
            slack,
            gate,
            seconds,
            entry.peak_bytes,
            entry.first_call_s,
        )


def replay(grid: Grid, sampler: Name, num_trials: int, seed: int, without: Sequence[str] = ()) -> Search:
    """Run one search on a grid and return it.

    Args:
        without: sources of prior knowledge to leave out, because the grid holds the same records.
    """
    wanted = Wanted(same_picture_only=not grid.judged)
    space = FixedSpace([recipe for recipe in grid.entries if not recipe.is_baseline], wanted)
    simulated = Simulated(grid, np.random.default_rng(1000 + seed))
    chosen = sampler_of(
        sampler,
        space,
        sources=known_sources(grid.name, grid.device_name, wanted, without),
        effects=effects(space.options, None, wanted),
        seed=seed,
    )
    search = Search(wanted, space, chosen, simulated, Trials(num_trials), judges=grid.judged)
    search.run()
    return search


BUDGETS = (0.05, 0.1, 0.2, 0.4)
"""Trials of a search, as shares of the grid's recipes."""


def trials_of(grid: Grid, share: float) -> int:
    return max(1, math.floor(share * (len(grid.entries) - 1)))


def regret(grid: Grid, search: Search) -> float:
    """Return how much slower the proposal is than the best allowed recipe, 0 if it is the best.

    A proposal that fails the gate counts as the baseline.
    """
    pick = search.pick()
    entry = grid.baseline if pick is None or fails_gate(grid, search) else grid.entries[pick.recipe]
    return entry.median_s / grid.best.median_s - 1


def fails_gate(grid: Grid, search: Search) -> bool:
    """Whether what a search proposes fails the gate in the record."""
    pick = search.pick()
    return pick is not None and grid.judged and grid.entries[pick.recipe].gate is not Gate.PASSED


GRIDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tiny-sd": ("tuner-grid-tiny-sd.json", ()),
    "tiny-flux": ("tuner-grid-tiny-flux.json", ()),
    "flux-dev": ("tuner-grid-flux-dev-h200.json", ("records",)),
}
"""By name: the file, and the prior knowledge that is left out because it holds the same records."""


@click.command()
@click.option("--grid", "names", multiple=True, type=click.Choice(list(GRIDS)), help="Default: all.")
@click.option("--seeds", type=click.IntRange(1, 1000), default=5, show_default=True)
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), help="Default: below results/.")
def tuner(names: Sequence[str], seeds: int, record: Path | None) -> int:
    """Compare the samplers on recorded grids."""
    found: dict[str, Any] = {}
    for name in names or GRIDS:
        file, without = GRIDS[name]
        grid = read_grid(RESULTS / file)
        found[name] = evaluate(grid, seeds, without)
        click.echo(f"{name}: {len(grid.entries)} recipes, best {grid.best.recipe.text}")
        for sampler, result in found[name]["samplers"].items():
            click.echo(f"  {sampler:8} median regret by trials {result['median_regret']}")
        click.echo(f"  published recipes: {found[name]['seeds_recipes']}")
    path = record or RESULTS / "tuner-replay.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def evaluate(grid: Grid, seeds: int, without: Sequence[str] = ()) -> dict[str, Any]:
    """Return what each sampler reaches on a grid, as plain data."""
    results: dict[str, Any] = {}
    for sampler in SAMPLERS:
        by_budget = {
            trials_of(grid, share): [
                regret(grid, replay(grid, sampler, trials_of(grid, share), k, without)) for k in range(seeds)
            ]
            for share in BUDGETS
        }
        medians = {number: float(np.median(found)) for number, found in by_budget.items()}
        results[sampler] = {
            "regret": {str(number): [round(one, 4) for one in found] for number, found in by_budget.items()},
            "median_regret": {str(number): round(one, 4) for number, one in medians.items()},
            "trials_within_2_percent": next((n for n, one in medians.items() if one <= NEAR), None),
        }
    ranked = sorted(grid.allowed, key=lambda entry: entry.median_s)
    return {
        "recipes": len(grid.entries) - 1,
        "allowed": len(ranked) - 1,
        "within_2_percent": sum(e.median_s <= (1 + NEAR) * ranked[0].median_s for e in ranked),
        "best": grid.best.recipe.text,
        "best_speedup": round(grid.baseline.median_s / grid.best.median_s, 3),
        "samplers": results,
        "seeds_recipes": _seeds_recipes(grid),
    }


def _seeds_recipes(grid: Grid) -> dict[str, float]:
    """Return the regret of the recipes of the grid that a published study names for this model."""
    named = {
        cell.recipe
        for study in published_studies()
        for cell in read_study(study).cells
        if cell.recipe and cell.model in (grid.name, grid.name.removeprefix("synthetic:"))
    }
    known = {resolve(text) for text in named}
    best = grid.best.median_s
    return {
        entry.recipe.text: round(entry.median_s / best - 1, 4)
        for entry in grid.allowed
        if entry.recipe in known and not entry.recipe.is_baseline
    }


if __name__ == "__main__":
    raise SystemExit(run(tuner))
