"""Replay recorded grids: how near each way of searching comes to the best recipe.

    python -m benchmarks.tuner            every grid and sampler, 25 seeds; writes results/tuner-replay.json

A simulated machine answers from a record. On the embedded models' grids every second round is shown to the search: a
screening is one of them, a final two. The other rounds say how fast recipes really are, so no search gains from a lucky
round, and the best recipe, which is the best of those held out, is if anything luckier than what is compared with it.
Judging by few prompts misses the record's bound by as much as fewer prompts do; the final is the record's verdict.

For `--gate-runs` a final draws new images instead: its figure is normally distributed around the record's, with as wide
an interval as 13 prompts of three seeds have. Then a search may propose what the record's mean says is below the limit.

"Trials" are the different recipes that were measured, the baseline not counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np

from benchmarks.command import run
from benchmarks.recorded_grids import FINAL, Entry, FixedSpace, Grid, median_s, read_grid
from benchmarks.rival_samplers import Name, rival
from benchmarks.tuner_grids import RESULTS
from vivace.evidence.studies.study_file import published_studies, read_study
from vivace.foundation.spec.record import Outcome
from vivace.foundation.stats import Gate
from vivace.foundation.stats.intervals import student_t
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.tuning.model.by_model import ModelSampler
from vivace.tuning.model.priors import effects, known_sources
from vivace.tuning.search.objective import Objective
from vivace.tuning.search.results import Result, Rung
from vivace.tuning.search.search import Search
from vivace.tuning.search.timetable import Budget

SAMPLERS: tuple[Literal["model"] | Name, ...] = ("model", "tpe", "greedy", "random")
NEAR = 0.02
_NOISE = {Rung.SCREENED: 0.05, Rung.JUDGED: 0.03, Rung.FINAL: 0.005}
"""Standard deviation that is added to a logarithm where a grid has one round."""
_ERRORS = {Rung.SCREENED: 0.06, Rung.JUDGED: 0.05, Rung.FINAL: 0.04}
"""Of the logarithm of a gain on the embedded models' grids, whose rounds differ by 0.045."""
_JUDGED = 6  # prompts of a judgement


@dataclass
class Simulated:
    """A machine that answers from a grid, with noise."""

    grid: Grid
    rng: np.random.Generator
    new_images: bool = False

    def refuse(self, recipes: Sequence[Recipe]) -> list[Result]:
        return []

    def screen(self, recipes: Sequence[Recipe]) -> list[Result]:
        return self._beside(recipes, Rung.SCREENED)

    def judge(self, recipes: Sequence[Recipe]) -> list[Result]:
        return self._beside(recipes, Rung.JUDGED)

    def prove(self, recipes: Sequence[Recipe]) -> list[Result]:
        return self._beside((self.grid.baseline.recipe, *recipes), Rung.FINAL)

    def draw_more(self, recipes: Sequence[Recipe]) -> list[Result]:
        """A final's images are all that there are; `benchmarks.tuner_timed` adds them batch by batch."""
        return []

    def _beside(self, recipes: Sequence[Recipe], rung: Rung) -> list[Result]:
        """Measure recipes in one comparison: their gains share the baseline's rounds, and with them its luck."""
        before = self._seconds(self.grid.baseline, rung)
        return [self._result(recipe, rung, before) for recipe in recipes]

    def _seconds(self, entry: Entry, rung: Rung) -> float:
        """Return the median of calls of a round, or of two rounds in a final."""
        number = min(len(entry.rounds), 2 if rung is Rung.FINAL else 1)
        chosen = self.rng.choice(len(entry.rounds), number, replace=False)
        calls = [self.rng.choice(entry.rounds[k], 3) for k in chosen]
        return float(np.median(np.concatenate(calls)))

    def _result(self, recipe: Recipe, rung: Rung, before: float) -> Result:
        entry = self.grid.entries[recipe]
        if not entry.rounds:
            return Result(recipe, entry.outcome, rung, reason="as recorded")
        seconds = self._seconds(entry, rung)
        gain = math.log(before / seconds)
        error = _ERRORS[rung]
        if self.grid.has_one_round:
            error = _NOISE[rung]
            gain += error * float(self.rng.standard_normal())
        result = Result(recipe, Outcome.MEASURED, rung, gain, error, seconds=seconds)
        result = replace(result, peak_bytes=entry.peak_bytes, first_call_s=entry.first_call_s)
        if recipe.is_baseline:
            return replace(result, gain=0.0, gate=Gate.PASSED)
        if not self.grid.has_quality or rung is Rung.SCREENED or entry.slack is None:
            return result
        if rung is Rung.FINAL and not self.new_images:
            return replace(result, slack=entry.slack, gate=entry.gate)
        if rung is Rung.FINAL:
            slack, reach = self._other_images(entry, FINAL)
            gate = Gate.FAILED if slack + 2 * reach < 0 else Gate.UNCLEAR if slack < 0 else Gate.PASSED
            return replace(result, slack=slack, gate=gate)
        # Of the record's prompts some are drawn, so the mean misses the record's by what the others say.
        error = entry.width / student_t(0.95, entry.prompts - 1) * math.sqrt(entry.prompts / _JUDGED - 1)
        slack = entry.slack + error * float(self.rng.standard_normal())
        gate = Gate.FAILED if entry.gate is Gate.FAILED else Gate.UNCLEAR if slack < 0 else Gate.PASSED
        return replace(result, slack=slack, slack_error=max(0.004, error), gate=gate)

    def _other_images(self, entry: Entry, prompts: float) -> tuple[float, float]:
        """Return the slack by other images, and the reach of their interval."""
        of_one = entry.width / student_t(0.95, entry.prompts - 1) * math.sqrt(entry.prompts)
        error = of_one / math.sqrt(prompts)
        reach = student_t(0.95, prompts - 1) * error
        mean = (entry.slack or 0.0) + entry.width + error * float(self.rng.standard_normal())
        return mean - reach, reach


def replay(
    grid: Grid,
    sampler: Literal["model"] | Name,
    num_trials: int,
    seed: int,
    without: Sequence[str] = (),
    new_images: bool = False,
) -> Search:
    """Run one search on a grid and return it.

    Args:
        new_images: draw the verdicts of finals anew.
        without: sources of prior knowledge to leave out, because the grid holds the same records.
    """
    objective = Objective(same_picture_only=not grid.has_quality)
    space = FixedSpace([recipe for recipe in grid.entries if not recipe.is_baseline], objective)
    simulated = Simulated(grid, np.random.default_rng(1000 + seed), new_images)
    chosen = (
        ModelSampler(
            space,
            np.random.default_rng(seed),
            known_sources(grid.name, grid.device_name, objective, without, grid.is_cpu),
            effects(space.options, None, objective),
        )
        if sampler == "model"
        else rival(sampler, space, seed)
    )
    search = Search(objective, space, chosen, simulated, Budget(num_trials), judges=grid.has_quality)
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
    return _proposed(grid, search).true_s / grid.best.true_s - 1


def regret_by_all_rounds(grid: Grid, search: Search) -> float:
    """Return the same where recipes are as fast as all rounds say, not only those held out.

    They are twice as many, so the best recipe owes less to luck. A search has seen half of them.
    """
    return _proposed(grid, search).all_s / min(entry.all_s for entry in grid.allowed) - 1


def least_regret(grid: Grid) -> float:
    """Return the regret of measuring every recipe with all rounds that a search may see, and taking the best.

    No search can be expected to do better: so far do the rounds that are held out differ from those that are seen.
    """
    best = min(grid.allowed, key=lambda entry: median_s(entry.rounds))
    return best.true_s / grid.best.true_s - 1


def _proposed(grid: Grid, search: Search) -> Entry:
    pick = search.pick()
    return grid.baseline if pick is None or fails_gate(grid, search) else grid.entries[pick.recipe]


def fails_gate(grid: Grid, search: Search) -> bool:
    """Whether what a search proposes fails the gate in the record."""
    pick = search.pick()
    return pick is not None and grid.has_quality and grid.entries[pick.recipe].gate is not Gate.PASSED


GRIDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tiny-sd": ("tuner-grid-tiny-sd.json", ()),
    "tiny-flux": ("tuner-grid-tiny-flux.json", ()),
    "flux-dev": ("tuner-grid-flux-dev-h200.json", ("records",)),
}
"""By name: the file, and the prior knowledge that is left out because it holds the same records."""


@click.command()
@click.option("--grid", "names", multiple=True, type=click.Choice(list(GRIDS)), help="Default: all.")
@click.option("--seeds", type=click.IntRange(1, 1000), default=25, show_default=True)
@click.option(
    "--gate-runs", type=click.IntRange(0, 1000), default=25, show_default=True, help="Of each judged grid."
)
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), help="Default: below results/.")
def tuner(names: Sequence[str], seeds: int, gate_runs: int, record: Path | None) -> int:
    """Compare the samplers on recorded grids."""
    results: dict[str, Any] = {}
    for name in names or GRIDS:
        file, without = GRIDS[name]
        grid = read_grid(RESULTS / file)
        results[name] = evaluate(grid, seeds, without)
        click.echo(f"{name}: {len(grid.entries)} recipes, best {grid.best.recipe.text}")
        for sampler, result in results[name]["samplers"].items():
            click.echo(f"  {sampler:8} median regret by trials {result['median_regret']}")
        if grid.has_quality and gate_runs:
            results[name]["gate"] = gate_figures(grid, gate_runs)
            click.echo(f"  gate {results[name]['gate']}")
        click.echo(f"  published recipes: {results[name]['seeds_recipes']}")
    path = record or RESULTS / "tuner-replay.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def evaluate(grid: Grid, seeds: int, without: Sequence[str] = ()) -> dict[str, Any]:
    """Return what each sampler reaches on a grid, as plain data."""
    results: dict[str, Any] = {}
    for sampler in SAMPLERS:
        searches = {
            (number := trials_of(grid, share)): [
                replay(grid, sampler, number, k, without) for k in range(seeds)
            ]
            for share in BUDGETS
        }
        by_budget = {number: [regret(grid, search) for search in of] for number, of in searches.items()}
        medians = {number: float(np.median(regrets)) for number, regrets in by_budget.items()}
        by_all = {n: [regret_by_all_rounds(grid, search) for search in of] for n, of in searches.items()}
        results[sampler] = {
            "regret": {
                str(number): [round(value, 4) for value in regrets] for number, regrets in by_budget.items()
            },
            "median_regret": {str(number): round(median, 4) for number, median in medians.items()},
            "median_by_all_rounds": {
                str(n): round(float(np.median(regrets)), 4) for n, regrets in by_all.items()
            },
            "trials_within_2_percent": next((n for n, median in medians.items() if median <= NEAR), None),
        }
    ranked = sorted(grid.allowed, key=lambda entry: entry.true_s)
    return {
        "recipes": len(grid.entries) - 1,
        "allowed": len(ranked) - 1,
        "within_2_percent": sum(e.true_s <= (1 + NEAR) * ranked[0].true_s for e in ranked),
        "best": grid.best.recipe.text,
        "best_speedup": round(grid.baseline.true_s / grid.best.true_s, 3),
        "least_regret": round(least_regret(grid), 4),
        "samplers": results,
        "seeds_recipes": _seeds_recipes(grid),
    }


def gate_figures(grid: Grid, runs: int) -> dict[str, Any]:
    """Return how many of so many searches propose what fails the gate, with finals that draw other images."""
    proposed, below, failed = 0, [], 0
    for seed in range(runs):
        search = replay(grid, "model", trials_of(grid, 0.1), seed, new_images=True)
        pick = search.pick()
        if pick is not None:
            entry = grid.entries[pick.recipe]
            proposed += 1
            failed += entry.gate is Gate.FAILED
            if entry.is_below_the_limit:
                below.append(entry.recipe.text)
    return {"runs": runs, "proposed": proposed, "failed": failed, "mean_below_limit": below}


def _seeds_recipes(grid: Grid) -> dict[str, float]:
    """Return the regret of the recipes of the grid that a published study names for this model."""
    named = {
        cell.recipe
        for study in published_studies()
        for cell in read_study(study).cells
        if cell.recipe and cell.model in (grid.name, grid.name.removeprefix("synthetic:"))
    }
    recipes = {resolve(text) for text in named}
    best = grid.best.true_s
    return {
        entry.recipe.text: round(entry.true_s / best - 1, 4)
        for entry in grid.allowed
        if entry.recipe in recipes and not entry.recipe.is_baseline
    }


if __name__ == "__main__":
    raise SystemExit(run(tuner))
