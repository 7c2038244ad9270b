"""Which recipes to measure next. All samplers see the same history; only the way in which they choose differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np

from vivace.errors import RecipeError
from vivace.recipes.recipe import Recipe
from vivace.spec.record import Outcome
from vivace.stats import Gate
from vivace.tuning.belief import Array, Belief, Datum, Effect, merged
from vivace.tuning.priors import Source
from vivace.tuning.seen import Rung, Seen, latest
from vivace.tuning.space import Space, is_usual
from vivace.tuning.wanted import Wanted

Name = Literal["model", "tpe", "random", "greedy"]
_NOT_YET = frozenset({Outcome.CRASHED, Outcome.TIMED_OUT})
_SLACK_OF_CHANGES = Effect(-0.01, 0.03)
_SLACK_OF_SAME = Effect(0.0, 0.01)
_SLACK_AT_BEST = 0.02
_SLACK_ERROR = {Rung.SCREENED: 0.05, Rung.JUDGED: 0.008, Rung.PROVEN: 0.004}
_NEAR = 0.2  # the error of figures of the same model, or of the same family of GPUs
TRIES = 200


class Sampler(Protocol):
    """Chooses recipes."""

    def ask(self, history: Sequence[Seen], number: int) -> list[Recipe]:
        """Return up to `number` recipes that are not in the history; none if there is nothing left to try."""
        ...

    def worth(self, results: Sequence[Seen], history: Sequence[Seen]) -> list[float]:
        """Return how good each measured recipe promises to be: its gain, discounted by the doubts about its quality."""
        ...


def sampler_of(
    name: Name,
    space: Space,
    *,
    sources: Sequence[Source] = (),
    effects: dict[str, Effect] | None = None,
    start: Recipe | None = None,
    seconds_of: Callable[[Recipe], float] | None = None,
    seed: int = 0,
) -> Sampler:
    """Return the sampler of that name.

    Raises:
        Unsupported: "tpe" without Optuna.
    """
    rng = np.random.default_rng(seed)
    match name:
        case "random":
            return RandomSampler(space, rng)
        case "greedy":
            return GreedySampler(space, rng)
        case "tpe":
            from vivace.tuning.tpe import TpeSampler

            return TpeSampler(space, seed)
        case "model":
            return ModelSampler(space, rng, tuple(sources), effects or {}, start, seconds_of)


class AsMeasured:
    """Takes measurements as they are: a recipe promises what it gained, unless its quality is in doubt."""

    def worth(self, results: Sequence[Seen], history: Sequence[Seen]) -> list[float]:
        return [(one.gain or 0.0) * _chance_of(one) for one in results]


def _chance_of(one: Seen) -> float:
    """Return the probability that the quality of a recipe passes in full, by its own figures alone."""
    if one.slack is None:
        return 1.0
    return float(_normal(np.array([one.slack / _SLACK_ERROR[one.rung]]))[0])


@dataclass
class RandomSampler(AsMeasured):
    """Random recipes: as many techniques as a recipe has on average, each option as likely as any other."""

    space: Space
    rng: np.random.Generator

    def ask(self, history: Sequence[Seen], number: int) -> list[Recipe]:
        known = {one.recipe for one in history}
        found: dict[Recipe, None] = {}
        fixed = getattr(self.space, "recipes", None)
        if fixed is not None:
            left = [recipe for recipe in fixed if recipe not in known and self.space.holds(recipe)]
            order = self.rng.permutation(len(left))[:number]
            return [left[int(i)] for i in order]
        for _ in range(TRIES * number):
            recipe = self.space.base()
            for _ in range(int(self.rng.integers(1, 5))):
                option = self.space.options[int(self.rng.integers(len(self.space.options)))]
                try:
                    recipe = recipe.with_(option)
                except RecipeError:
                    continue
            if recipe not in known and not recipe.is_baseline and self.space.holds(recipe):
                found[recipe] = None
            if len(found) == number:
                break
        return list(found)


@dataclass
class GreedySampler(AsMeasured):
    """One at a time, as people do: every option alone, then the best one with every other, and so on."""

    space: Space
    rng: np.random.Generator

    def ask(self, history: Sequence[Seen], number: int) -> list[Recipe]:
        results = latest(history)
        current = self.space.base()
        best = 0.0
        while True:
            above = [r for o in self.space.options if (r := with_option(current, o)) and self.space.holds(r)]
            left = [recipe for recipe in above if recipe not in results]
            if left:
                order = self.rng.permutation(len(left))[:number]
                return [left[int(i)] for i in order]
            good = [r for r in above if value_of(results[r], self.space.wanted) > best]
            if not good:
                return []
            current = max(good, key=lambda r: value_of(results[r], self.space.wanted))
            best = value_of(results[current], self.space.wanted)


@dataclass
class ModelSampler:
    """Measures where the expected improvement is largest, times the probability that the limits are kept.

    Attributes:
        sources: figures of other runs.
        effects: of the goal, by option; see `priors.effects`.
        start: a recipe to begin with.
        seconds_of: what a trial of a recipe takes, about; improvement is then sought per second.

    A recipe has at most one option that no measured recipe has had, so techniques come in one at a time, and what fails
    is known, and a technique comes in aimed as usual, or as is reported of this model.
    """

    space: Space
    rng: np.random.Generator
    sources: tuple[Source, ...] = ()
    effects: dict[str, Effect] = field(default_factory=dict)
    start: Recipe | None = None
    seconds_of: Callable[[Recipe], float] | None = None

    def __post_init__(self) -> None:
        self.gain = Belief(self.effects)
        self.slack = Belief(
            {t.text: _SLACK_OF_SAME if t.same_picture else _SLACK_OF_CHANGES for t in self.space.options},
            pair_sd=0.03,
            own_sd=0.03,  # quality adds up less well than time: two techniques may cost more, or less, than each
        )
        self.memory = Belief(usual=Effect(0.0, 0.3), pair_sd=0.05)
        names = {option.name for option in self.space.options}
        every = [d for source in self.sources for d in source.data]
        self._prior_data = merged([d for d in every if {technique.name for technique in d.recipe} <= names])
        near = [datum.recipe for datum in self._prior_data if datum.error <= _NEAR]
        self._reported = set().union(*map(texts_of, near))
        self._blame: dict[frozenset[str], float] = {}
        self._tested: set[str] = set()
        self._tested_names: set[str] = set()

    def learn(self, history: Sequence[Seen]) -> None:
        """Take in what has been measured."""
        results = list(latest(history).values())
        measured = [one for one in results if one.gain is not None]
        data = [Datum(one.recipe, float(one.gain or 0), one.error) for one in measured]
        known = {one.recipe for one in measured}
        data += [datum for datum in self._prior_data if datum.recipe not in known]
        self.gain.learn(data)
        judged = [one for one in measured if one.slack is not None and not one.recipe.is_baseline]
        self.slack.learn(
            [
                Datum(one.recipe, _clipped(one.slack or 0.0) - _SLACK_AT_BEST, _SLACK_ERROR[one.rung])
                for one in judged
            ]
        )
        self._base_memory = next(
            (math.log(o.peak_bytes) for o in measured if o.recipe.is_baseline and o.peak_bytes), None
        )
        if self._base_memory is not None:
            self.memory.learn(
                [
                    Datum(o.recipe, math.log(o.peak_bytes) - self._base_memory, 0.02)
                    for o in measured
                    if o.peak_bytes
                ]
            )

    def ask(self, history: Sequence[Seen], number: int) -> list[Recipe]:
        results = latest(history)
        self.learn(history)
        if self.start is not None and self.start not in results and not self.start.is_baseline:
            return [self.start]
        chosen: list[Recipe] = []
        proposable = [one for one in results.values() if one.slack is not None or one.recipe.is_baseline]
        best = max([0.0, *(value_of(one, self.space.wanted) for one in proposable)])
        around = sorted(results, key=lambda r: -value_of(results[r], self.space.wanted))[:3]
        self._blame = _blame(history)
        measured = [one.recipe for one in results.values() if one.is_measured]
        self._tested = set().union(*map(texts_of, [*measured, self.space.base()]))
        self._tested_names = {technique.name for recipe in measured for technique in recipe}
        pool = self.space.pool(self._draw, [self.space.base(), *around])
        pool += self.space.pool(lambda recipes: self._score(recipes, best), [])
        pool = [r for r in dict.fromkeys(pool) if r not in results and not r.is_baseline]
        pool = [r for r in pool if self._is_known_but_for_one(r)]
        while pool and len(chosen) < number:
            pick = pool.pop(int(np.argmax(self._score(pool, best))))
            chosen.append(pick)
            # Until it is measured it counts as what is expected of it, so that the next one is a different bet.
            mean, _ = self.gain.estimate([pick])
            self.gain.learn([*self.gain.data, Datum(pick, float(mean[0]), 0.05)])
            pool = [r for r in pool if not _tries_the_same(r, pick, self._tested)]
        self.learn(history)
        return chosen

    def worth(self, results: Sequence[Seen], history: Sequence[Seen]) -> list[float]:
        """By the model, which has seen all recipes, so that one lucky measurement does not win."""
        if not results:
            return []
        self.learn(history)
        self._blame = _blame(history)
        recipes = [one.recipe for one in results]
        mean, _ = self.gain.estimate(recipes)
        chance = self._chance(recipes)
        # Of quality a recipe's own images say more than those of recipes like it.
        own = [
            _chance_of(one) if one.slack is not None else float(chance[k]) for k, one in enumerate(results)
        ]
        return [float(gain) * probability for gain, probability in zip(mean, own, strict=True)]

    def _is_known_but_for_one(self, recipe: Recipe) -> bool:
        if len(texts_of(recipe) - self._tested) > 1:
            return False
        return all(
            technique.name in self._tested_names
            or technique.text in self._tested
            or technique.text in self._reported
            or is_usual(technique)
            for technique in recipe
        )

    def _draw(self, recipes: list[Recipe]) -> Array:
        found: Array = self.gain.draw(recipes, self.rng) + np.log(self._chance(recipes))
        return found - 100.0 * self._unknown(recipes)

    def _score(self, recipes: list[Recipe], best: float) -> Array:
        mean, sd = self.gain.estimate(recipes)
        found: Array = improvement(mean, sd, best) * self._chance(recipes)
        if self.seconds_of is not None:
            found = found / np.array([self.seconds_of(recipe) for recipe in recipes])
        return found - 100.0 * self._unknown(recipes)

    def _unknown(self, recipes: list[Recipe]) -> Array:
        return np.array([0.0 if self._is_known_but_for_one(recipe) else 1.0 for recipe in recipes])

    def _chance(self, recipes: list[Recipe]) -> Array:
        """Return the probability that each recipe runs and keeps the limits, at least a millionth."""
        chance = np.array([_runs(recipe, self._blame) for recipe in recipes])
        mean, sd = self.slack.estimate(recipes)
        if not self.space.wanted.same_picture_only:
            chance *= _normal((mean + _SLACK_AT_BEST) / sd)
        limit = self.space.wanted.max_memory_bytes
        if limit is not None and self._base_memory is not None:
            mean, sd = self.memory.estimate(recipes)
            chance *= _normal((math.log(limit) - self._base_memory - mean) / sd)
        found: Array = np.maximum(chance, 1e-6)
        return found


def constraint_of(one: Seen) -> float:
    """Return what Optuna calls feasible if it is not above zero."""
    if not one.is_measured:
        return 1.0
    return -1.0 if one.slack is None else -one.slack


@lru_cache(maxsize=100_000)
def texts_of(recipe: Recipe) -> frozenset[str]:
    """Return the texts of a recipe's techniques."""
    return frozenset(technique.text for technique in recipe)


def _tries_the_same(recipe: Recipe, other: Recipe, tested: set[str]) -> bool:
    """Whether both would be the first to try an option of the same technique: one of them tells about both."""
    mine = {technique.name for technique in recipe if technique.text not in tested}
    return any(technique.name in mine for technique in other if technique.text not in tested)


def with_option(recipe: Recipe, option: Any) -> Recipe | None:
    try:
        return recipe.with_(option)
    except RecipeError:
        return None


def improvement(mean: Array, sd: Array, best: float) -> Array:
    """Return the expected improvement over `best` of normally distributed values."""
    z = (mean - best) / sd
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    found: Array = (mean - best) * _normal(z) + sd * density
    return np.maximum(found, 0.0)


def _normal(z: Array) -> Array:
    return np.array([0.5 * (1 + math.erf(float(x) / math.sqrt(2))) for x in np.atleast_1d(z)])


def _clipped(slack: float) -> float:
    return min(max(slack, -0.3), _SLACK_AT_BEST)


def value_of(one: Seen, wanted: Wanted, failed: float = -math.inf) -> float:
    """Return the gain of a recipe that may be proposed; `failed` for others."""
    if one.gain is None or not one.keeps(wanted) or one.gate is Gate.FAILED or one.is_ruined:
        return failed
    if one.slack is not None and one.slack < 0 and failed == -math.inf:
        return failed
    return one.gain


def _blame(history: Sequence[Seen]) -> dict[frozenset[str], float]:
    """Return which techniques, alone or in pairs, probably make recipes fail, with the probability."""
    good: set[frozenset[str]] = set()
    for one in history:
        if one.is_measured:
            good |= _parts(one.recipe)
    blame: dict[frozenset[str], float] = {}
    for one in history:
        if one.is_measured or one.outcome is Outcome.FAILED_QUALITY:
            continue
        suspects = _parts(one.recipe) - good
        for part in suspects:
            weight = 0.5 if one.outcome in _NOT_YET else 1.0
            blame[part] = max(blame.get(part, 0.0), 0.9 * weight / len(suspects))
    return blame


def _parts(recipe: Recipe) -> set[frozenset[str]]:
    texts = texts_of(recipe)
    return {frozenset((a, b)) for a in texts for b in texts}


def _runs(recipe: Recipe, blame: dict[frozenset[str], float]) -> float:
    found = 1.0
    if blame:
        for part in _parts(recipe):
            found *= 1 - blame.get(part, 0.0)
    return found
