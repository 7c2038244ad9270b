"""What a search tries when time is short; estimates of time, and what is expected of more images."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from benchmarks.recorded_grids import FixedSpace
from vivace.foundation.spec.record import Outcome
from vivace.foundation.spec.study import WorkloadRequest
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.tuning.final.finals import ImagePlan
from vivace.tuning.model.by_model import ModelSampler
from vivace.tuning.model.priors import PriorSource
from vivace.tuning.model.regression import Datum
from vivace.tuning.search.objective import Objective
from vivace.tuning.search.pace import SCREENING, WARM_UP, Pace
from vivace.tuning.search.results import Result, Rung
from vivace.tuning.search.search import Search
from vivace.tuning.search.timetable import Budget, Timetable

COMPILING_S, STARTING_S, LOADING_S, BASE_S = 160.0, 60.0, 5.0, 5.0
GAINS = {
    "baseline": 1.0,
    "cuda_graph": 1.3,
    "compile+cuda_graph": 3.0,
    "quantize(fp8_static)+compile+cuda_graph": 3.5,
}
REFUSED = resolve("quantize(fp8_static)+compile+cuda_graph")


@dataclass
class Host:
    """A machine with a clock, on which compiling takes longer than expected and one recipe is refused."""

    now: float = STARTING_S
    pace: Pace = field(default_factory=lambda: Pace(on_gpu=True, base_s=BASE_S, reported_s=124.0))
    compiled: set[Recipe] = field(default_factory=set)

    def seconds_of_final(self, finalists: Sequence[Result]) -> float:
        return self.pace.of_final(finalists, 2, 0)

    def seconds_of_rounds(self, finalists: Sequence[Result]) -> float:
        return self.seconds_of_final(finalists)

    def seconds_of_images(self, finalists: Sequence[Result]) -> float:
        raise AssertionError("random weights are not judged")

    def seconds_of_batch(self, recipes: Sequence[Recipe]) -> float:
        return sum(map(self.pace.of_trial, (Recipe(), *recipes)))

    def refuse(self, recipes: Sequence[Recipe]) -> list[Result]:
        return [
            Result(recipe, Outcome.OUT_OF_MEMORY, Rung.SCREENED, reason="10.1 GB")
            for recipe in recipes
            if recipe == REFUSED
        ]

    def screen(self, recipes: Sequence[Recipe]) -> list[Result]:
        return [self.round(recipe, Rung.SCREENED, SCREENING) for recipe in (Recipe(), *recipes)][1:]

    def judge(self, recipes: Sequence[Recipe]) -> list[Result]:
        raise AssertionError("random weights are not judged")

    def draw_more(self, recipes: Sequence[Recipe]) -> list[Result]:
        raise AssertionError("random weights are not judged")

    def prove(self, recipes: Sequence[Recipe]) -> list[Result]:
        for _ in range(2):
            results = [self.round(recipe, Rung.FINAL, self.pace.repeats) for recipe in (Recipe(), *recipes)]
        return results

    def round(self, recipe: Recipe, rung: Rung, calls: int) -> Result:
        gain = math.log(GAINS[recipe.text])
        seconds = BASE_S / math.exp(gain)
        compiling = 0.0
        if "compile" in recipe.text:
            compiling = COMPILING_S if recipe not in self.compiled else COMPILING_S / 5
            self.compiled.add(recipe)
        calls_s = compiling + (calls + WARM_UP) * seconds
        self.pace.note(calls_s, 1, calls_s + LOADING_S)
        self.now += calls_s + LOADING_S
        result = Result(
            recipe, Outcome.MEASURED, rung, gain, 0.02, seconds=seconds, first_call_s=seconds + compiling
        )
        self.pace.learn([result])
        return dataclasses.replace(result, peak_bytes=1e9)


def searched(minutes: float) -> tuple[Search, Host]:
    """Return the search after it has run, on a host of whose model records have all recipes."""
    host, objective = Host(), Objective(same_picture_only=True)
    recipes = [resolve(text) for text in GAINS if text != "baseline"]
    data = [Datum(resolve(text), math.log(gain), 0.05) for text, gain in GAINS.items() if gain > 1]
    budget = Budget(minutes=minutes, timetable=host, started=0.0, clock=lambda: host.now)
    space = FixedSpace(recipes, objective)
    sampler = ModelSampler(
        space,
        np.random.default_rng(0),
        (PriorSource("records", tuple(data)),),
        seconds_of=host.pace.of_trial,
        most_s=lambda: budget.most_s,
    )
    base = host.round(Recipe(), Rung.SCREENED, SCREENING)
    search = Search(objective, space, sampler, host, budget, judges=False, history=[base])
    search.run()
    return search, host


def test_what_compiles_for_minutes_is_tried_where_they_are_left_and_proven_in_time() -> None:
    search, host = searched(8)
    pick = search.pick()
    assert pick is not None
    assert pick.recipe == resolve("compile+cuda_graph"), (
        "the better one is refused, so the next best is tried"
    )
    assert pick.rung is Rung.FINAL
    assert host.now < 8 * 60


def test_it_is_not_tried_where_they_are_not() -> None:
    search, host = searched(5)
    pick = search.pick()
    assert pick is not None
    assert pick.recipe == resolve("cuda_graph")
    assert not host.compiled
    assert host.now < 5 * 60


@pytest.mark.parametrize(
    ("total_s", "recipe", "timeout_s"),
    [
        (480.0, "cuda_graph", 96.0),  # a fifth of the search
        (480.0, "compile", 2 * (2 + 5 * 5.0 + 80)),  # twice what is expected
        (2000.0, "compile(max-autotune)", 600.0),  # of any round
    ],
)
def test_a_recipe_that_hangs_is_stopped(total_s: float, recipe: str, timeout_s: float) -> None:
    plan = ImagePlan((WorkloadRequest(),), (13,), (13,))
    table = Timetable(Pace(on_gpu=True, base_s=BASE_S), plan, judges=False, ends_at=1.0, total_s=total_s)
    assert table.timeout_s([resolve(recipe)], 600.0) == pytest.approx(timeout_s)
