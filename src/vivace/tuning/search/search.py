"""The search: screen promising recipes, judge the better half, prove the best beside the baseline.

With a time limit it has an answer in the first half: a final of recipes of which one almost certainly passes.
A bolder recipe replaces the answer only where another final proves it.

All measurements go through a `Measurer`: the benchmark, or in tests a recorded grid. The search knows only the history,
which comes from the store, so an interrupted search goes on where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vivace.foundation.spec.record import Outcome
from vivace.foundation.stats import Gate
from vivace.recipes.recipe import Recipe
from vivace.tuning.model.by_model import ModelSampler
from vivace.tuning.model.priors import PriorSource
from vivace.tuning.search.objective import Objective
from vivace.tuning.search.results import (
    Measurer,
    Result,
    Rung,
    Unwatched,
    Watcher,
    floor_of,
    latest,
    shortest_as_fast,
)
from vivace.tuning.search.space import Space, path_of
from vivace.tuning.search.timetable import Budget

BATCH = 4
PROMOTED = 0.5
_MANY = 10  # trials; one is kept for the end
_FINALS = 8
"""Maximum number of finals: a finalist whose quality is not proven makes room for the next one."""
_WORTH_A_FINAL = 0.01
"""Expected improvement over the pick, as the logarithm of a speed-up."""
_LIKELY = 0.5
_WORTH_IMAGES = 0.25
_HOPELESS = 0.02
"""Probabilities that a recipe's quality passes in the final."""
REACH = 0.10
"""Gap to the best so far, or two standard errors, beyond which a slower recipe is not judged."""
_MOST_BELIEFS = 16
_CONFIDENT = 1.96
_MOST_REFUSED = 40  # recipes that are refused without being measured, one after the other
MOST_USEFUL = 3
"""Number of recipes in a final, any of which may be the fastest."""
SURE = 0.95
"""Probability that at least one finalist must pass, while there is no answer yet."""
MOST = 5
"""Finalists at most: each is fast, and the baseline's images are drawn once for all."""
_OF_A_PATH = 2
_WORTH_A_PLACE = 0.005
"""Expected improvement that a further finalist must add."""
_MORE_LIKELY = 0.05
"""Increase in the probability that one passes that a further finalist must bring."""


@dataclass(frozen=True)
class ExpectedGain:
    """The posterior of a technique's gain: how many times as fast a recipe is with it, with a 95 % interval."""

    technique: str
    times: float
    low: float
    high: float
    was_tried: bool

    @property
    def is_telling(self) -> bool:
        """Whether the technique was tried, or its interval lies on one side of 1."""
        return self.was_tried or self.low > 1 or self.high < 1

    def to_json(self) -> dict[str, Any]:
        ci95 = [self.low, self.high]
        return {"technique": self.technique, "times": self.times, "ci95": ci95, "tried": self.was_tried}


@dataclass(frozen=True)
class Explanation:
    """The posterior gains at the end of a search, the best first, of techniques that were tried or that earlier figures
    decide; how many others there are; and the number of earlier figures, by source."""

    beliefs: tuple[ExpectedGain, ...] = ()
    num_unknown: int = 0
    sources: tuple[tuple[str, int], ...] = ()


@dataclass
class Search:
    """One search. Where quality is not judged, the final follows screening. Earlier results come first."""

    objective: Objective
    space: Space
    sampler: ModelSampler
    measurer: Measurer
    budget: Budget
    judges: bool = True
    watcher: Watcher = field(default_factory=Unwatched)
    history: list[Result] = field(default_factory=list)
    batch: int = BATCH
    exhausted: bool = False
    refused: set[Recipe] = field(default_factory=set)

    @property
    def num_trials(self) -> int:
        """The number of recipes that have been measured, the baseline not counted."""
        return len({result.recipe for result in self.history if not result.recipe.is_baseline} - self.refused)

    def run(self) -> Result | None:
        """Search until the budget is spent, then prove; return the pick, None if no recipe beats the baseline."""
        self._judge_promising()  # of an interrupted search
        for _ in range(_FINALS):
            self._explore(self._has_to_prove)
            if not self._has_to_prove():
                break
            self._final([result.recipe for result in self._portfolio()])
            self._decide(_WORTH_IMAGES, until_one_passes=True)
        self._explore(lambda: False)
        if self.judges and not self.exhausted and not self.num_trials:
            self._final(self._ask(MOST_USEFUL))  # where there is no time for anything before it
        self._judge_until_one_may_pass()
        return self._prove()

    def _explore(self, stops: Callable[[], bool]) -> None:
        """Screen and judge recipes until `stops` says so, or only the final still fits."""
        number = self.budget.number
        if self.judges and number >= _MANY:
            number -= 1  # for recipes that passed a final, with all techniques that work; see `assemble`
        while not self.exhausted and self.num_trials < number and not stops():
            if self.budget.is_over(self.num_trials, self._likely_finalists()):
                break
            recipes = self._ask(int(min(self.batch, number - self.num_trials)))
            self.exhausted = not recipes
            if not recipes or not (recipes := self.budget.affordable(recipes, self._likely_finalists())):
                break
            self.watcher.note(f"screening {len(recipes)}: {', '.join(recipe.text for recipe in recipes)}")
            results = self.measurer.screen(recipes)
            self._note(results)
            if not any(result.recipe in recipes for result in results):
                break  # the time ended before one of them was measured
            self._leave_out_failed()
            if self.judges and not stops():
                self._judge_promising(recipes)

    @property
    def _floor(self) -> float:
        """The gain that a proposal must exceed."""
        return floor_of(self.history, self.objective)

    def _usable(self, rung: Rung | None = None) -> list[Result]:
        """Return the last results that keep the limits, of one rung or all, without the baseline's."""
        return [
            result
            for result in latest(self.history).values()
            if rung in (None, result.rung) and result.keeps(self.objective) and not result.recipe.is_baseline
        ]

    def _has_to_prove(self) -> bool:
        """Whether there is no answer yet and it is time to prove one."""
        if not self.judges or self.pick() is not None:
            return False
        finalists = self._portfolio()
        is_new = any(result.rung < Rung.FINAL for result in finalists)
        return is_new and self.budget.is_time_to_prove(finalists)

    def _ask(self, number: int) -> list[Recipe]:
        """Return recipes that may work here; the others are recorded and cost no trial."""
        refused = 0
        while True:
            recipes = self.sampler.ask(self.history, number)
            out = self.measurer.refuse(recipes)
            self.refused |= {result.recipe for result in out}
            self.history += out
            self._leave_out_failed()
            recipes = [recipe for recipe in recipes if recipe not in self.refused]
            refused += len(out)
            if recipes or not out or refused > _MOST_REFUSED or self.budget.is_over(0, []):
                return recipes

    def _note(self, results: Sequence[Result]) -> None:
        for result in results:
            self.history.append(result)
            if not result.recipe.is_baseline:
                self.watcher.measured(result, self.history)

    def _leave_out_failed(self) -> None:
        """Remove the options that failed by themselves from the space for good."""
        base = self.space.base()
        for result in self.history:
            added = [t for t in result.recipe if t not in base.techniques]
            if result.outcome is Outcome.OUT_OF_MEMORY and self.objective.max_memory_bytes is not None:
                continue  # with others that save memory it may fit
            if len(added) == 1 and not result.is_measured and result.outcome.is_final:
                self.space.leave_out(added[0], result.reason or result.outcome.value)

    def _judge_promising(self, recipes: Sequence[Recipe] | None = None) -> None:
        """Judge the better half of what can still win, and techniques of unknown quality before others use them."""
        if not self.judges:
            return
        screened = [r for r in self._usable(Rung.SCREENED) if recipes is None or r.recipe in recipes]
        passing = [r for r in self._candidates() if r.slack is None or r.slack >= 0]
        best = max([self._floor, *(result.own_gain for result in passing)])
        promising = [result for result in screened if result.own_gain > best - max(REACH, 2 * result.error)]
        number = math.ceil(PROMOTED * len(screened))
        chosen = [result.recipe for result in self._by_promise(promising)[:number]]
        chosen += [
            result.recipe
            for result in screened
            if result.recipe not in chosen and self._tells_of_quality(result)
        ]
        if chosen:
            self.watcher.note(f"judging the quality of {len(chosen)}")
            self._note(self.measurer.judge(chosen))

    def _tells_of_quality(self, result: Result) -> bool:
        """Return whether a recipe is faster by a technique that changes the image and was never judged."""
        judged_techniques = {t for result in self.history if result.slack is not None for t in result.recipe}
        return result.own_gain > _WORTH_A_FINAL and any(
            not technique.facts.same_picture and technique not in judged_techniques
            for technique in result.recipe
        )

    def _judge_until_one_may_pass(self) -> None:
        """Judge recipes that were only screened, the most promising first, until one will probably pass its final."""
        while self.judges and not any(result.chance > _LIKELY for result in self._candidates()):
            left = [result for result in self._usable(Rung.SCREENED) if result.own_gain > _WORTH_A_FINAL]
            chosen = [result.recipe for result in self._by_promise(left)[:MOST_USEFUL]]
            chosen = self.budget.affordable(chosen, [])
            if not chosen:
                break
            self.watcher.note(f"no recipe is likely to pass yet; judging the quality of {len(chosen)} more")
            results = self.measurer.judge(chosen)
            self._note(results)
            if not any(result.recipe in chosen for result in results):
                break

    def _by_promise(self, results: Sequence[Result]) -> list[Result]:
        promises = self.sampler.promise(results, self.history)
        order = sorted(range(len(results)), key=lambda k: -promises[k])
        return [results[k] for k in order]

    def _candidates(self, *, screened: bool = False) -> list[Result]:
        """Return the candidates, the most promising first; with `screened` also recipes that were not judged yet."""
        floor = self._floor
        candidates = [
            result
            for result in self._usable()
            if not result.is_ruined
            and result.chance > _HOPELESS
            and result.own_gain > floor
            and not (result.rung is Rung.FINAL and self.judges and result.gate is not Gate.PASSED)
            and (screened or not self.judges or result.rung > Rung.SCREENED)
        ]
        return self._by_promise(candidates)

    def _prove(self) -> Result | None:
        """Measure finalists beside the baseline until one passes and, in the budget, no other promises more."""
        tried: set[Recipe] = set()
        for _ in range(_FINALS):
            self._decide(_WORTH_IMAGES)
            pick = self.pick()
            first = self._portfolio() if pick is None else self.finalists(self._rivals(pick), pick)
            finalists = [result.recipe for result in first]
            if not finalists or set(finalists) <= tried:
                break
            if pick is not None:
                if not self.budget.allows_rounds(first[:1]):
                    break
                if any(result.own_gain < pick.own_gain + REACH for result in first):
                    finalists.append(pick.recipe)  # what may be as fast is measured side by side
            elif tried and not self.budget.allows_another_final():
                break
            finalists += self._shorter(first)
            tried |= set(finalists)
            self._final(finalists)
        self._decide(_HOPELESS)
        return self.pick()

    def _final(self, recipes: Sequence[Recipe]) -> None:
        """Measure finalists beside the baseline, as many as there is time for."""
        results = latest(self.history)
        finalists = [results.get(recipe) or self._expected(recipe) for recipe in recipes]
        while len(finalists) > 1 and not self.budget.allows_rounds(finalists):
            finalists.pop()
        recipes = [result.recipe for result in finalists]
        if not recipes:
            return
        self.watcher.final(recipes)
        self._note(self.measurer.prove(recipes))

    def _expected(self, recipe: Recipe) -> Result:
        """Return the expected result of an unmeasured recipe."""
        ((gain, error),) = self.sampler.expected_gains([recipe], self.history)
        base = latest(self.history).get(Recipe())
        seconds = None if base is None or not base.seconds else base.seconds / math.exp(gain - error)
        return Result(recipe, Outcome.MEASURED, Rung.SCREENED, gain, error, seconds=seconds)

    def _decide(self, least_chance: float, *, until_one_passes: bool = False) -> None:
        """Draw more images of unclear finalists that would be the pick and have this chance, while there is time."""
        while undecided := self._undecided(least_chance):
            if until_one_passes and self.pick() is not None:
                return
            if not self.budget.allows_images(undecided):
                return
            self.watcher.note(
                f"drawing more images of {', '.join(result.recipe.text for result in undecided)}"
            )
            results = self.measurer.draw_more([result.recipe for result in undecided])
            if not results:
                return
            self._note(results)

    def _undecided(self, least_chance: float) -> list[Result]:
        """Return the finalists that more images may turn into the pick."""
        pick = self.pick()
        least = self._floor if pick is None else pick.own_gain + _WORTH_A_FINAL
        return [
            result
            for result in self._usable(Rung.FINAL)
            if result.gate is Gate.UNCLEAR and result.own_gain > least and result.chance > least_chance
        ]

    def open_ends(self) -> list[Result]:
        """Return the recipes that a longer search may still prove, the most promising first."""
        undecided = self._undecided(_HOPELESS)
        return self._by_promise([*undecided, *self._candidates(screened=True)])

    def _portfolio(self) -> list[Result]:
        """Return the finalists of a search without an answer: one of them almost certainly passes, if possible."""
        # Recipes that passed but were not shown to be faster get more rounds if there is nothing else.
        candidates = self._rivals() or self._candidates()
        if not candidates:
            return []
        chosen = [candidates.index(result) for result in self.finalists(candidates)]
        if not self.judges:
            return [candidates[k] for k in chosen]
        samples = self.sampler.values(candidates, self.history)
        error = float(np.median([result.error for result in candidates]))
        return [candidates[k] for k in portfolio(samples, self._floor + error, chosen)]

    def _rivals(self, pick: Result | None = None) -> list[Result]:
        """Return what no final has measured: candidates, and what is expected to be faster than these or the pick."""
        new = [result for result in self._candidates(screened=True) if result.rung < Rung.FINAL]
        return [*new, *self.propose_unmeasured(new if pick is None else [pick, *new])]

    def finalists(self, candidates: Sequence[Result], over: Result | None = None) -> list[Result]:
        """Choose finalists greedily by expected improvement over posterior samples.

        Those that share their doubts, such as one path of the latents with several decoders, pass or fail together in
        each posterior sample, so one of them represents all. With `over` they must gain more than it.
        """
        if not candidates:
            return []
        least = 0.0 if over is None else _WORTH_A_FINAL
        floor = self._floor if over is None else over.own_gain
        samples = self.sampler.values(candidates, self.history)
        best = best_of_each(samples, [path_of(result.recipe) for result in candidates])
        chosen = useful(samples[:, best], floor, MOST_USEFUL, least)
        return self.distinct([candidates[best[k]] for k in chosen])

    def pick(self) -> Result | None:
        """Return the best proven recipe, without techniques that were proven to gain nothing."""
        floor = self._floor
        good = [
            result
            for result in self._usable(Rung.FINAL)
            if result.own_gain > floor
            and (result.least_gain is None or result.least_gain > floor)
            and (not self.judges or result.gate is Gate.PASSED)
        ]
        return shortest_as_fast(max(good, key=lambda result: result.own_gain), good) if good else None

    def _shorter(self, finalists: Sequence[Result]) -> list[Recipe]:
        """Return the first finalist without techniques expected to gain nothing, if it may win and there is time."""
        first = finalists[0]
        less = self.sampler.shorter(first.recipe, self.history)
        if less.is_baseline or less in {result.recipe for result in finalists} or not self.space.holds(less):
            return []
        result = latest(self.history).get(less)
        if result is not None and (not result.keeps(self.objective) or result.is_ruined):
            return []
        trials = self.num_trials if result is None else 0
        if self.budget.is_over(trials, [*finalists, replace(first, recipe=less)]):
            return []
        return [] if self.measurer.refuse([less]) else [less]

    def propose_unmeasured(self, results: Sequence[Result]) -> list[Result]:
        """Return the best results with what is expected to make them faster, where nothing has measured that.

        Trials are chosen for their information, and the last ones mostly fail; these are chosen to be the answer.
        """
        if not self.judges or self.num_trials >= self.budget.number:
            return []
        longer: dict[Recipe, Result] = {}
        for result in results[:MOST_USEFUL]:
            recipe = self.sampler.assemble(result.recipe, self.history)
            if recipe not in latest(self.history):
                longer.setdefault(
                    recipe, replace(result, recipe=recipe, rung=Rung.SCREENED, gate=None, slack=None)
                )
        refused = {result.recipe for result in self.measurer.refuse(list(longer))} if longer else set()
        return [result for recipe, result in longer.items() if recipe not in refused]

    def distinct(self, finalists: Sequence[Result]) -> list[Result]:
        """Return recipes that differ by more than techniques expected to gain nothing."""
        kept: dict[Recipe, Result] = {}
        for result in finalists:
            kept.setdefault(self.sampler.shorter(result.recipe, self.history), result)
        return list(kept.values())

    def explanation(self, sources: Sequence[PriorSource]) -> Explanation:
        """Return the posterior of the search's model."""
        tried = {technique for result in self.history if result.is_measured for technique in result.recipe}
        options = list(dict.fromkeys([*tried, *self.space.options]))
        gains = self.sampler.expected_gains([Recipe((option,)) for option in options], self.history)
        beliefs = []
        for option, (effect, error) in zip(options, gains, strict=True):
            low, high = (math.exp(effect + sign * _CONFIDENT * error) for sign in (-1, 1))
            beliefs.append(ExpectedGain(option.text, math.exp(effect), low, high, option in tried))
        telling = [belief for belief in beliefs if belief.is_telling]
        return Explanation(
            tuple(sorted(telling, key=lambda belief: (-belief.times, belief.technique))[:_MOST_BELIEFS]),
            len(beliefs) - len(telling),
            tuple((source.name, len(source.data)) for source in sources if source.data),
        )

    def _likely_finalists(self) -> list[Result]:
        """Return the finalists of now, with the first one's shorter form if there is room."""
        finalists = self.finalists(self._candidates())
        less = self.sampler.shorter(finalists[0].recipe, self.history) if finalists else Recipe()
        if len(finalists) == MOST_USEFUL or less in {Recipe(), *(result.recipe for result in finalists)}:
            return list(finalists)
        return [*finalists, replace(finalists[0], recipe=less)]


def useful(samples: NDArray[np.float64], floor: float, number: int, least: float) -> list[int]:
    """Choose finalists greedily by expected improvement over posterior samples of gains (samples, candidates), which
    are no more than `floor` where a candidate does not pass; the first one must improve by `least`."""
    reached = np.full(len(samples), floor)
    chosen: list[int] = []
    while len(chosen) < min(number, samples.shape[1]):
        more = np.maximum(samples - reached[:, None], 0.0).mean(axis=0)
        which = int(np.argmax(more))
        if which in chosen or more[which] <= least:
            break
        chosen.append(which)
        least = max(least, _WORTH_A_PLACE)
        reached = np.maximum(reached, samples[:, which])
    return chosen


def best_of_each(samples: NDArray[np.float64], paths: Sequence[object]) -> list[int]:
    """Return the candidates, two of each path at most, as all of a path pass or fail together."""
    best: list[int] = []
    for k in np.argsort(-samples.mean(axis=0)):
        if paths[k] is None or sum(paths[other] == paths[k] for other in best) < _OF_A_PATH:
            best.append(int(k))
    return best


def portfolio(samples: NDArray[np.float64], least: float, chosen: Sequence[int]) -> list[int]:
    """Return the chosen candidates with others, until one of them passes and gains more than `least`, the smallest that
    a final can prove, in 95 % of the samples (see `useful`). The safest comes first: a short final leaves out the last.
    """
    passes: NDArray[np.bool_] = np.asarray(samples > least)
    final = list(chosen)
    held: NDArray[np.bool_] = np.asarray(passes[:, final].any(axis=1))
    while held.mean() < SURE and len(final) < min(MOST, samples.shape[1]):
        more = (passes & ~held[:, None]).mean(axis=0)
        which = int(np.argmax(more))
        if more[which] < _MORE_LIKELY:
            break
        final.append(which)
        held |= passes[:, which]
    return sorted(final, key=lambda k: -passes[:, k].mean())
