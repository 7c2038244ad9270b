"""Replay recorded grids by the clock: does a search of so many minutes end with a proven recipe?

    python -m benchmarks.tuner_timed                       tiny-sd and tiny-flux, 2, 4 and 8 minutes, 25 seeds each
    python -m benchmarks.tuner_timed --looks 1             the same where a final draws its first images only
    python -m benchmarks.tuner_timed --slow 2              beside other programs

`benchmarks.tuner` counts trials: its finals cost nothing, and their verdicts are by many images. Here everything takes
its time on a machine whose speed changes: starting, loading, each call of the baseline and of recipes, drawing images
and scoring them. Estimates of time, deadlines and the plan of the images are those of `vivace tune`. Each final draws
new images, thirteen at first, so its verdict is in doubt as it really is: the mean of a recipe's images is normally
distributed around the record's, as widely as the record's images are, and its interval is estimated from as few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import click
import numpy as np

from benchmarks.command import run
from benchmarks.recorded_grids import Entry, FixedSpace, Grid, read_grid
from benchmarks.tuner import GRIDS
from benchmarks.tuner_grids import RESULTS
from vivace.benchmark.progress import Deadline
from vivace.foundation.spec.record import Outcome
from vivace.foundation.spec.study import WorkloadRequest
from vivace.foundation.stats import Gate, Interval
from vivace.foundation.stats.intervals import DEFAULT_SPREAD, mean_over_rounds, student_t
from vivace.foundation.stats.sequential import sure_of_each
from vivace.recipes.recipe import Recipe
from vivace.report.variety import SURE_FAIL
from vivace.tuning.final.finals import ImagePlan
from vivace.tuning.model.by_model import ModelSampler
from vivace.tuning.model.priors import effects, known_sources
from vivace.tuning.search.objective import Objective
from vivace.tuning.search.pace import SCREENING, WARM_UP, Pace
from vivace.tuning.search.results import Result, Rung, expected_low
from vivace.tuning.search.search import Search
from vivace.tuning.search.timetable import FINAL_ROUNDS, Budget, Timetable

_SIZES, _PROMPTS = (14, 26, 39, 52, 91), (7, 13, 26, 39, 39)
_STARTING_S, _LOADING_S, _READING_S, _SCORING_S = 15.0, 1.5, 3.0, 0.05
_JUDGED, _JUDGED_CALLS = 6, 4
_CALL_SD, _ROUND_SD, _SPEED_SD = 0.03, 0.05, 0.10
"""Standard deviations of logarithms: of a call, of a process, of the machine's speed from one stretch to the next."""
_STRETCH_S = 20.0


@dataclass
class TimedMachine:
    """A `Measurer` that answers from a grid, with a clock.

    Attributes:
        slow: how many times as long as on the record's machine everything takes.
        looks: at a final's images, at most.
        finals_s: when each final began.
    """

    grid: Grid
    minutes: float
    rng: np.random.Generator
    slow: float = 1.0
    looks: int = len(_SIZES)
    now: float = 0.0
    means: dict[Recipe, list[float]] = field(default_factory=dict)
    logs: dict[Recipe, list[float]] = field(default_factory=dict)
    gains: dict[Recipe, Result] = field(default_factory=dict)
    finals_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plan = ImagePlan((WorkloadRequest(),) * self.looks, _SIZES[: self.looks], _PROMPTS[: self.looks])
        self.time = Timetable(
            Pace(on_gpu=not self.grid.is_cpu), self.plan, judges=True, clock=lambda: self.now
        )
        self.speeds: dict[int, float] = {}
        self.now = self.slow * _STARTING_S

    def start(self) -> Result:
        """Measure the baseline alone."""
        seconds = self._round(self.grid.baseline, SCREENING)
        self.time.pace.base_s = seconds
        self.time.spend(self.minutes, 0.0)
        return replace(self._result(Recipe(), Rung.SCREENED, seconds, seconds), gain=0.0)

    def refuse(self, recipes: Sequence[Recipe]) -> list[Result]:
        return []

    def screen(self, recipes: Sequence[Recipe]) -> list[Result]:
        return self._beside(recipes, Rung.SCREENED, SCREENING, 0)

    def judge(self, recipes: Sequence[Recipe]) -> list[Result]:
        return self._beside(recipes, Rung.JUDGED, _JUDGED_CALLS, _JUDGED)

    def prove(self, recipes: Sequence[Recipe]) -> list[Result]:
        deadline = self.time.deadline(recipes, Rung.FINAL)
        assert deadline is not None
        self.finals_s.append(self.now)
        # The store keeps the rounds of recipes that were in an earlier final, unless all were.
        recipes = [r for r in recipes if len(self.logs.get(r, [])) < FINAL_ROUNDS] or recipes
        trials = [self.grid.entries[recipe] for recipe in (Recipe(), *recipes)]
        seconds: dict[int, dict[int, float]] = {}
        for index in range(FINAL_ROUNDS):
            order = list(range(len(trials)))[:: 1 if index % 2 == 0 else -1]
            for position, trial in enumerate(order):
                if not trials[trial].rounds or not deadline.allows(trial, index, order[position:]):
                    continue
                images = self.plan.sizes[0] if index == 0 and self._draws(trials[trial].recipe, 0) else 0
                deadline.begin()
                took = self._round(trials[trial], self.time.pace.repeats, images)
                deadline.end(trial, index)
                if deadline.left_for_rounds_s < 0:
                    break  # it was stopped
                seconds.setdefault(trial, {})[index] = took
        self._score(1 + len(recipes), self.plan.sizes[0])
        baseline = seconds.pop(0, {})
        if self.now > self._end_s or not baseline:
            return []  # the images were not compared in time
        self.time.looks.setdefault(Recipe(), 1)
        self.time.pace.base_s = float(np.mean(list(baseline.values())))
        results = [
            self._with_looks(self._proven(trials[trial].recipe, baseline, of))
            for trial, of in seconds.items()
            if set(of) & set(baseline)
        ]
        self.time.note(results)
        return results

    def _proven(self, recipe: Recipe, baseline: dict[int, float], seconds: dict[int, float]) -> Result:
        """Return the result of all finals of a recipe."""
        logs = self.logs.setdefault(recipe, [])
        logs += [math.log(baseline[k] / seconds[k]) for k in sorted(set(seconds) & set(baseline))]
        mean = mean_over_rounds(logs, [_CALL_SD] * len(logs), 2 * DEFAULT_SPREAD.sd**2, DEFAULT_SPREAD.dof)
        low = mean.interval().low
        assert mean.error is not None
        assert low is not None
        rung = Rung.FINAL if len(logs) >= FINAL_ROUNDS else Rung.JUDGED
        result = self._result(recipe, rung, mean.interval().point, 1.0)
        result = replace(
            result, error=mean.error, least_gain=math.log(low), seconds=float(np.mean(list(seconds.values())))
        )
        self._add_images(recipe, 0)
        self.gains[recipe] = result
        return result

    def draw_more(self, recipes: Sequence[Recipe]) -> list[Result]:
        looks = {recipe: self.time.looks.get(recipe, 1) for recipe in recipes}
        look = min(looks.values())
        if look >= len(self.plan.sizes):
            return []
        chosen = [recipe for recipe in recipes if looks[recipe] == look]
        deadline = self.time.deadline_of_images(chosen, look)
        assert deadline is not None
        images = self.plan.num_images(look)
        due = list(range(1 + len(chosen)))
        drawn = []
        for trial, recipe in enumerate((Recipe(), *chosen)):
            if not deadline.allows(trial, 0, due[trial:]):
                continue
            deadline.begin()
            self._round(self.grid.entries[recipe], 1, images if self._draws(recipe, look) else 0)
            deadline.end(trial, 0)
            if deadline.left_for_rounds_s < 0:
                return []
            drawn.append(recipe)
        self._score(len(drawn), images)
        if self.now > self._end_s or drawn[:1] != [Recipe()]:
            return []
        self.time.looks[Recipe()] = max(look + 1, self.time.looks.get(Recipe(), 1))
        for recipe in drawn[1:]:
            self._add_images(recipe, look)
        return [self._with_looks(self.gains[recipe]) for recipe in drawn[1:]]

    def _draws(self, recipe: Recipe, look: int) -> bool:
        return self.time.looks.get(recipe, 0) <= look

    @property
    def _end_s(self) -> float:
        return 1.05 * 60 * self.minutes

    def _beside(self, recipes: Sequence[Recipe], rung: Rung, calls: int, images: int) -> list[Result]:
        deadline = self.time.deadline(recipes, rung)
        before = self._timed(deadline, 0, self.grid.baseline, calls, images, range(1 + len(recipes)))
        results = []
        for k, recipe in enumerate(recipes):
            entry = self.grid.entries[recipe]
            seconds = self._timed(deadline, k + 1, entry, calls, images, range(k + 1, 1 + len(recipes)))
            if seconds is None or before is None:
                continue
            results.append(self._result(recipe, rung, before, seconds))
        if images:
            self._score(1 + len(recipes), images)
            results = [self._with_verdict(result) for result in results]
        self.time.note(results)
        return results

    def _timed(
        self, deadline: Deadline | None, trial: int, entry: Entry, calls: int, images: int, due: Sequence[int]
    ) -> float | None:
        """Return the seconds of a round, infinite for a recipe that fails; None if there was no time for it."""
        if deadline is not None and not deadline.allows(trial, 0, due):
            return None
        if deadline is not None:
            deadline.begin()
        seconds = self._round(entry, calls, images)
        if deadline is not None:
            deadline.end(trial, 0)
            if deadline.left_for_rounds_s < 0:
                return None
        return seconds

    def _round(self, entry: Entry, calls: int, images: int = 0) -> float:
        """Let a round pass, and return the median of its calls."""
        began = self.now
        self.now += self.slow * _LOADING_S
        if not entry.rounds:
            return math.inf
        process = float(np.exp(_ROUND_SD * self.rng.standard_normal()))
        seconds = []
        for _ in range(WARM_UP + max(calls, images)):
            call = entry.true_s * process * float(np.exp(_CALL_SD * self.rng.standard_normal()))
            self.now += call * self._speed()
            seconds.append(call * self._speed())
        spent = self.now - began
        self.time.pace.note(sum(seconds), 1, spent)
        return float(np.median(seconds[WARM_UP : WARM_UP + calls]))

    def _speed(self) -> float:
        """Return how many times as long as usual everything takes now."""
        stretch = int(self.now / _STRETCH_S)
        if stretch not in self.speeds:
            self.speeds[stretch] = self.slow * float(np.exp(_SPEED_SD * self.rng.standard_normal()))
        return self.speeds[stretch]

    def _score(self, recipes: int, images: int) -> None:
        began = self.now
        self.now += self.slow * (_READING_S + _SCORING_S * recipes * images)
        self.time.pace.note_quality(recipes * images, 0, self.now - began)

    def _result(self, recipe: Recipe, rung: Rung, before: float, seconds: float) -> Result:
        entry = self.grid.entries[recipe]
        if not entry.rounds:
            return Result(recipe, entry.outcome, rung, reason="as recorded")
        result = Result(recipe, Outcome.MEASURED, rung, math.log(before / seconds), 0.06, seconds=seconds)
        return replace(result, peak_bytes=entry.peak_bytes or 1e9, first_call_s=seconds)

    def _with_verdict(self, result: Result) -> Result:
        """Judge a recipe by few images, which are not those of its final."""
        entry = self.grid.entries[result.recipe]
        if result.recipe.is_baseline or not result.is_measured or entry.slack is None:
            return result
        return self._of_images(result, [self._mean(entry, _JUDGED)], [_JUDGED], 0.95, is_final=False)

    def _add_images(self, recipe: Recipe, look: int) -> None:
        entry = self.grid.entries[recipe]
        means = self.means.setdefault(recipe, [])
        if len(means) == look and entry.slack is not None:
            means.append(
                self._mean(
                    entry, self.plan.prompts_at(look) - (self.plan.prompts_at(look - 1) if look else 0)
                )
            )
        self.time.looks[recipe] = max(look + 1, self.time.looks.get(recipe, 0))

    def _mean(self, entry: Entry, prompts: float) -> float:
        """Return by how much the mean of new images exceeds the limit."""
        truth = (entry.slack or 0.0) + entry.width
        return truth + _sd_of(entry) / math.sqrt(prompts) * float(self.rng.standard_normal())

    def _with_looks(self, result: Result) -> Result:
        entry = self.grid.entries[result.recipe]
        if entry.slack is None:
            return replace(result, gate=entry.gate)
        looks = self.time.looks[result.recipe]
        counts = np.diff([0.0, *(self.plan.prompts_at(look) for look in range(looks))])
        return self._of_images(result, self.means[result.recipe], counts, self.plan.sure, is_final=True)

    def _of_images(
        self, result: Result, means: Sequence[float], counts: Any, sure: float, *, is_final: bool
    ) -> Result:
        entry = self.grid.entries[result.recipe]
        prompts = float(np.sum(counts))
        mean = float(np.average(means, weights=counts))
        guess = _sd_of(entry) * math.sqrt(
            self.rng.chisquare(max(1, round(prompts) - 1)) / max(1, round(prompts) - 1)
        )
        error = guess / math.sqrt(prompts)
        low = mean - student_t(sure, prompts - 1) * error
        fails = sure_of_each(SURE_FAIL, self.plan.sizes) if is_final else SURE_FAIL
        high = mean + student_t(fails, prompts - 1) * error
        gate = Gate.FAILED if high < 0 else Gate.PASSED if low >= 0 else Gate.UNCLEAR
        slack, slack_error, luck = low, 0.004, 0.0
        if gate is Gate.UNCLEAR or not is_final:
            to_come = self.time.prompts_to_come(Rung.FINAL if is_final else Rung.JUDGED, result.recipe)
            slack, slack_error, luck = expected_low(
                Interval(mean, low, high), round(prompts), round(prompts), to_come, self.plan.sure,
                of_the_final=is_final,
            )  # fmt: skip
        images = round(float(np.sum(counts)))
        return replace(result, slack=slack, slack_error=slack_error, luck=luck, gate=gate, images=images)


def _sd_of(entry: Entry) -> float:
    """Return the standard deviation of what images of a prompt keep."""
    return entry.width / student_t(0.95, entry.prompts - 1) * math.sqrt(entry.prompts)


def timed_replay(
    grid: Grid,
    minutes: float,
    seed: int,
    *,
    slow: float = 1.0,
    looks: int = len(_SIZES),
    without: Sequence[str] = (),
) -> tuple[Search, TimedMachine]:
    """Run one search by the clock and return it with its machine."""
    objective = Objective()
    space = FixedSpace([recipe for recipe in grid.entries if not recipe.is_baseline], objective)
    machine = TimedMachine(grid, minutes, np.random.default_rng(2000 + seed), slow, looks)
    base = machine.start()
    budget = Budget(minutes=minutes, timetable=machine.time, started=0.0, clock=lambda: machine.now)
    sampler = ModelSampler(
        space,
        np.random.default_rng(seed),
        known_sources(grid.name, grid.device_name, objective, without, grid.is_cpu),
        effects(space.options, None, objective),
        seconds_of=machine.time.pace.of_trial,
        most_s=lambda: budget.most_s,
    )
    search = Search(objective, space, sampler, machine, budget, history=[base])
    search.run()
    return search, machine


def share_of_best(grid: Grid, search: Search) -> float:
    """Return the true gain of what a search proposes over the best recipe's; the baseline's without a proposal."""
    pick = search.pick()
    seconds = grid.baseline.true_s if pick is None else grid.entries[pick.recipe].true_s
    return grid.best.true_s / seconds


@click.command()
@click.option(
    "--grid", "names", multiple=True, type=click.Choice(["tiny-sd", "tiny-flux"]), help="Default: both."
)
@click.option("--minutes", multiple=True, type=float, default=(2.0, 4.0, 8.0), show_default=True)
@click.option("--seeds", type=click.IntRange(1, 1000), default=25, show_default=True)
@click.option("--slow", type=click.FloatRange(0.1, 20), default=1.0, show_default=True)
@click.option("--looks", type=click.IntRange(1, len(_SIZES)), default=len(_SIZES), show_default=True)
def tuner_timed(names: Sequence[str], minutes: Sequence[float], seeds: int, slow: float, looks: int) -> int:
    """Say how many searches of so many minutes end with a proven recipe, and how good it is."""
    for name in names or ("tiny-sd", "tiny-flux"):
        grid = read_grid(RESULTS / GRIDS[name][0])
        for budget in minutes:
            searches = [timed_replay(grid, budget, seed, slow=slow, looks=looks) for seed in range(seeds)]
            proven = sum(search.pick() is not None for search, _ in searches)
            below = sum(
                pick is not None and grid.entries[pick.recipe].is_below_the_limit
                for search, _ in searches
                for pick in [search.pick()]
            )
            late = sum(machine.now > 1.05 * 60 * budget for _, machine in searches)
            shares = [share_of_best(grid, search) for search, _ in searches]
            click.echo(
                f"{name}, {budget:g} minutes: {proven} of {seeds} proven, median {np.median(shares):.2f} of the best; "
                f"{below} below the limit, {late} late"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(run(tuner_timed))
