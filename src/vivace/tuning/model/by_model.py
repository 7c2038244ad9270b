"""The sampler of `vivace tune`: a model of techniques' effects proposes which recipe to measure next."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import median

import numpy as np

from vivace.foundation.spec.record import Outcome
from vivace.foundation.stats import Gate
from vivace.machinery.technique import Technique, Trait
from vivace.recipes.recipe import Recipe
from vivace.techniques.steps import Steps
from vivace.tuning.model.priors import SAME, PriorSource, touched_share
from vivace.tuning.model.regression import Array, Datum, Prior, Regression, merged
from vivace.tuning.search.results import RUINED, Result, Rung, floor_of, latest
from vivace.tuning.search.space import Space, is_usual, parts_of, path_of, tries_the_same, with_option

NUM_SAMPLES = 512
"""Number of posterior samples of whether recipes pass and how much they gain."""
_SLACK_OF_CHANGES = Prior(-0.04, 0.08)
_SLACK_OF_SAME = Prior(0.0, 0.01)
_SLACK_OF_TRAINED, _SLACK_OF_REPLACED = Prior(-0.02, 0.05), Prior(-0.005, 0.02)
"""Slack of distilled weights, which are compared with the weights that they imitate; of decoders, with what they
draw."""
_SAVES, _SAVES_NOTHING = Prior(-0.2, 0.3), Prior(0.0, 0.05)
_SLACK_AT_BEST = 0.02
_PAIR_SD = 0.15  # error of gains: a VAE's share of the time grows as the steps get shorter
_OWN_SD = 0.05  # error of gains: a round on a busy machine is off by more than its own interval
_BASELINE_SD = (
    0.1  # error of the baseline's own seconds, which enter every gain, from a few rounds on a busy machine
)
_ODD = 0.25
_NEAR = 0.2  # the error of figures of the same model, or of the same family of GPUs
_PEAK_ERROR = 0.02
_WORTH_A_PLACE = 0.5
"""Share of the first recipe's expected improvement that a recipe needs to be measured in the same batch."""
_WORTH_OF_LESS = 0.002  # weight of the number of techniques, for recipes that promise the same
_GIVES_NOTHING, _GIVES_LITTLE = 0.01, 0.02
"""Expected gain below which a technique is left out of a proposal, and tested by leaving it out in the final."""
_WORTH_BEGINNING = 0.1
"""Expected gain of a recipe that a search begins with."""
_AS_LIKELY = 0.9
"""The smallest ratio of the probabilities of keeping the limits without and with such a technique."""
_NOT_YET = frozenset({Outcome.CRASHED, Outcome.TIMED_OUT})
_SURE = 0.9

# What a technique may gain beside others: effects are logarithms of gains over the baseline, which add up only while
# shares of the time stay as they are. A tiny VAE takes 5 % off a call of 25 steps and 30 % off one of 4. Measured
# stages give the remaining share of each component. `steps` replaces the number of steps that weights were trained for,
# so the gains of both do not add up either.
#
# A GPU that waits for the CPU to launch its kernels gains about the waiting time from a replay of CUDA graphs, which is
# a single launch. A trace tells the waits before that is tried. They depend on the host, so records of captured recipes
# from other hosts count less where this one is slow.
_LARGEST_SHARE = 0.9
_LEAST, _MOST = 0.1, 10.0
"""Bounds of a weight: shares of single calls are noisy."""
_BESIDE_STEPS = 0.3
"""Remaining effect of distilled weights where `steps` sets another number: most of them need no guidance."""
WAITS = 0.1
"""The logarithm of time over busy time above which a GPU counts as waiting for the CPU."""
_REPEATED = 0.02
"""Standard error of the logarithm of a busy GPU's time, which hardly differs between processes."""
_ERROR, _SHARE_OF_WAIT = 0.03, 0.1
"""Standard error of a replay's gain: a constant part, and a share of the wait."""


@dataclass(frozen=True)
class Leverage:
    """The reach of techniques, by the seconds of each stage.

    Attributes:
        baseline: the baseline's; empty if unknown.
        stages: of recipes that change them, by their techniques; those with the most techniques come first.
    """

    baseline: Mapping[str, float] = field(default_factory=dict)
    stages: tuple[tuple[frozenset[Technique], Mapping[str, float]], ...] = ()

    @classmethod
    def of(cls, results: Sequence[Result]) -> Leverage:
        # Recipes that keep the image are screened with a few steps, and so are their stages.
        stages = [
            (frozenset(result.recipe.techniques), dict(result.stages_s))
            for result in results
            if result.stages_s
            and not result.recipe.is_baseline
            and (result.rung > Rung.SCREENED or not result.recipe.same_picture)
        ]
        baseline = next((dict(result.stages_s) for result in results if result.recipe.is_baseline), {})
        return cls(baseline, tuple(sorted(stages, key=lambda pair: -len(pair[0]))))

    def of_effect(self, recipe: Recipe, technique: Technique, targets: Sequence[str]) -> float:
        """Return the effect of a recipe's technique, on these components, in shares of its effect on the baseline."""
        others = frozenset(recipe.techniques) - {technique}
        if technique.facts.trained_steps is not None and any(isinstance(other, Steps) for other in others):
            return _BESIDE_STEPS
        beside = next((stages for techniques, stages in self.stages if techniques <= others), None)
        if beside is None or not self.baseline:
            return 1.0
        alone = _reach(targets, self.baseline)
        return min(max(_reach(targets, beside) / alone, _LEAST), _MOST) if alone else 1.0


def _reach(targets: Sequence[str], stages_s: Mapping[str, float]) -> float:
    return -math.log(1 - min(touched_share(targets, stages_s), _LARGEST_SHARE))


def captures(recipe: Iterable[Technique]) -> bool:
    """Return whether techniques replay the denoiser's launches instead of making them one by one."""
    return any(
        Trait.CAPTURED in technique.facts.provides and "denoiser" in technique.targets for technique in recipe
    )


def wait_of(result: Result, targets: Sequence[str] = ()) -> float:
    """Return the logarithm of the time over that without launch gaps in these components, or all; 0 if unknown."""
    if result.busy_share is None:
        return 0.0
    touched = touched_share(targets, dict(result.stages_s))
    return -math.log(1 - touched * (1 - min(result.busy_share, 1.0)))


def over_the_usual_baseline(history: Sequence[Result]) -> list[Result]:
    """Return the results, with gains relative to the baseline's usual time where that is more precise.

    On a shared host, a baseline that waits for the CPU took 3.4 s in one comparison and 6.5 s in the next. A recipe
    that keeps the GPU busy takes the same time in both, so the difference between its gains is the baseline's noise.
    """
    beside = {
        round(math.log(result.seconds) + result.gain, 6)
        for result in history
        if result.seconds and result.gain is not None and not result.recipe.is_baseline
    }
    if not beside:
        return list(history)
    usual = median(beside)
    over_usual = []
    for result in history:
        is_known = result.busy_share is not None and result.gain is not None and not result.recipe.is_baseline
        if is_known and result.seconds and wait_of(result) < WAITS:
            error = min(result.error, max(_REPEATED, result.own_error))
            over_usual.append(replace(result, gain=usual - math.log(result.seconds), error=error))
        else:
            over_usual.append(result)
    return over_usual


def expected_of_capturing(results: Mapping[Recipe, Result], options: Iterable[Technique]) -> list[Datum]:
    """Return the expected gain of adding a capturing option to each traced recipe, unless that was measured."""
    capturing = [option for option in options if captures((option,))]
    expected = {}
    for recipe, result in results.items():
        if result.gain is None or result.busy_share is None or captures(recipe):
            continue
        for option in capturing:
            captured = with_option(recipe, option)
            if captured is not None and captured not in results:
                wait = wait_of(result, option.targets)
                error = math.hypot(result.error, _ERROR + _SHARE_OF_WAIT * wait)
                expected[captured] = Datum(captured, result.gain + wait, error)
    return list(expected.values())


def as_of_another_host(data: Iterable[Datum], wait: float) -> list[Datum]:
    """Return records with a larger error for captured recipes, by the wait of the baseline on this host."""
    return [replace(datum, error=datum.error + wait) if captures(datum.recipe) else datum for datum in data]


@dataclass
class ModelSampler:
    """Proposes recipes by expected improvement times the probability of keeping the limits.

    Attributes:
        sources: figures of other runs.
        effects: of the goal, by option; see `priors.effects`.
        start: a recipe to begin with.
        seconds_of: the approximate seconds of a recipe's trial; proposals are then ranked by improvement per second.
        most_s: returns the longest allowed trial in seconds; recipes expected to take longer are not tried.
        peaks: predicted peaks in bytes, read again each time.

    A proposal has at most one option that no measured recipe has had, so that the cause of a failure is known. A new
    technique has its usual targets, or those recorded for this model. A recipe that was measured with this model on
    such a GPU may be proposed as a whole.
    """

    space: Space
    rng: np.random.Generator
    sources: tuple[PriorSource, ...] = ()
    effects: dict[str, Prior] = field(default_factory=dict)
    start: Recipe | None = None
    seconds_of: Callable[[Recipe], float] | None = None
    most_s: Callable[[], float] = lambda: math.inf
    peaks: Mapping[Recipe, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gain = Regression(self.effects, pair_sd=_PAIR_SD, own_sd=_OWN_SD, shared_sd=_BASELINE_SD)
        self.slack = Regression(
            {technique.text: _expected_slack(technique) for technique in self.space.options},
            # Quality adds up less well than time: two techniques may cost more, or less, than each. Guidance that ends
            # early gives back what fewer steps or cached blocks lose alone.
            pair_sd=0.1,
            own_sd=0.01,
            kind_sd=0.03,
            kind_of=path_of,
        )
        self.memory = Regression(
            {t.text: _SAVES if t.facts.saves_memory else _SAVES_NOTHING for t in self.space.options},
            usual=_SAVES_NOTHING,
            pair_sd=0.05,
        )
        names = {option.name for option in self.space.options}
        every = [d for source in self.sources for d in source.data]
        self._prior_data = merged([d for d in every if {technique.name for technique in d.recipe} <= names])
        near = [datum.recipe for datum in self._prior_data if datum.error <= _NEAR]
        self._reported = set().union(*map(texts_of, near))
        self._elsewhere = [datum for datum in self._prior_data if datum.error <= SAME]
        self._ran = {texts_of(datum.recipe) for datum in self._elsewhere}
        self._captured: list[Datum] = []
        self._blame: dict[frozenset[str], float] = {}
        self._tested: set[str] = set()
        self._tested_names: set[str] = set()
        self._alone = False

    def expected_gains(
        self, recipes: Sequence[Recipe], history: Sequence[Result]
    ) -> list[tuple[float, float]]:
        self.learn(history)
        mean, sd = self.gain.estimate(recipes)
        return list(zip(map(float, mean), map(float, sd), strict=True))

    def learn(self, history: Sequence[Result]) -> None:
        history = self._read(history)
        results = list(latest(history).values())
        measured = [result for result in results if result.gain is not None]
        measured_recipes = {result.recipe for result in measured}
        # Every measurement, not only a recipe's last: a screening is as good a look at its time as a judgement.
        data = [
            Datum(result.recipe, result.gain, result.error)
            for result in history
            if result.gain is not None and result.recipe in measured_recipes and not result.recipe.is_baseline
        ]
        wait = max((wait_of(result) for result in measured if result.recipe.is_baseline), default=0.0)
        if not self.space.objective.measures_memory:
            self._captured = expected_of_capturing(
                {result.recipe: result for result in measured}, self.space.options
            )
            data += self._captured
        learnt = {datum.recipe for datum in data}
        prior = [datum for datum in self._prior_data if datum.recipe not in learnt]
        self.gain.reweigh(Leverage.of(measured).of_effect)
        self.gain.learn([*data, *as_of_another_host(prior, wait)])
        with_quality = [
            result for result in measured if result.slack is not None and not result.recipe.is_baseline
        ]
        self.slack.learn(
            [
                # How far below its limit one recipe is says little about others: a single odd image decides.
                Datum(result.recipe, slack - _SLACK_AT_BEST, math.hypot(result.slack_error, _ODD * slack))
                for result in with_quality
                if (slack := min(max(result.slack or 0.0, -0.3), _SLACK_AT_BEST)) is not None
            ]
        )
        self._base_memory = next(
            (math.log(o.peak_bytes) for o in measured if o.recipe.is_baseline and o.peak_bytes), None
        )
        if self._base_memory is not None:
            peaks = {recipe: peak for recipe, peak in self.peaks.items() if peak}
            base, known = peaks.get(Recipe()), measured_recipes
            logs = {r.recipe: math.log(r.peak_bytes) - self._base_memory for r in measured if r.peak_bytes}
            logs |= {r: math.log(peak / base) for r, peak in peaks.items() if base and r not in known}
            self.memory.learn([Datum(recipe, value, _PEAK_ERROR) for recipe, value in logs.items()])

    def _refit(self, history: Sequence[Result]) -> None:
        self.learn(history)
        self._blame = failure_probabilities(history)

    def _read(self, history: Sequence[Result]) -> Sequence[Result]:
        return history if self.space.objective.measures_memory else over_the_usual_baseline(history)

    def ask(self, history: Sequence[Result], number: int) -> list[Recipe]:
        """Return up to `number` recipes that are not in the history; none if there is nothing left to try."""
        results = latest(self._read(history))
        self.learn(history)
        self._alone = not self._alone
        if self.start is not None and self.start not in results and not self.start.is_baseline:
            return [self.start]
        chosen: list[Recipe] = []
        best = self._best(list(results.values()))
        around = sorted(results, key=lambda r: -results[r].value(self.space.objective))[:3]
        self._blame = failure_probabilities(history)
        measured = [
            result.recipe
            for result in results.values()
            if result.is_measured or result.outcome is Outcome.OUT_OF_MEMORY
        ]
        self._tested = set().union(*map(texts_of, [*measured, self.space.base()]))
        self._tested |= {part for recipe in measured for technique in recipe for part in parts_of(technique)}
        self._tested_names = {technique.name for recipe in measured for technique in recipe}
        pool = self.space.pool(
            lambda recipes: (
                self.gain.draws(recipes, self.rng, 1)[0]
                + np.log(self._chance(recipes))
                - 100.0 * self._unknown(recipes)
            ),
            [self.space.base(), *around],
        )
        pool += self.space.pool(lambda recipes: self._score(recipes, best), [])
        known = [*self._elsewhere, *(datum for datum in self._captured if datum.value > WAITS)]
        pool += [datum.recipe for datum in known if self.space.holds(datum.recipe)]
        pool = [r for r in dict.fromkeys(pool) if r not in results and not r.is_baseline]
        pool = [r for r in pool if self._differs_by_one(r)]
        if not any(result.is_measured and not result.recipe.is_baseline for result in results.values()):
            recorded = {datum.recipe for datum in known}
            promising = [
                r for r in pool if r in recorded or any(t.facts.trained_steps is not None for t in r)
            ]
            if promising and (beginning := self._most_promising(promising)) is not None:
                return [beginning]
        judged_paths = {path_of(result.recipe) for result in history if result.slack is not None}
        first = 0.0
        while pool and len(chosen) < number:
            scores = self._score(pool, best)
            which = int(np.argmax(scores))
            if chosen and scores[which] < _WORTH_A_PLACE * first:
                break  # with this trial's result there is more to choose from
            first = first or float(scores[which])
            pick = self._trim(pool.pop(which), results)
            if pick in chosen:
                continue
            chosen.append(pick)
            # Until it is measured it counts with its expected value, so that the next proposal is a different bet.
            mean, _ = self.gain.estimate([pick])
            floor = floor_of(history, self.space.objective)
            best = max(best, floor + float((mean[0] - floor) * self._chance([pick])[0]))
            self.gain.learn([*self.gain.data, Datum(pick, float(mean[0]), 0.05)])
            pool = [r for r in pool if not tries_the_same(r, pick, self._tested)]
            # Recipes of one path pass or fail together, so one of them is judged, and its result counts next time.
            if (path := path_of(pick)) is not None and path not in judged_paths:
                pool = [r for r in pool if path_of(r) != path]
        self.learn(history)
        return chosen

    def values(self, results: Sequence[Result], history: Sequence[Result]) -> Array:
        """Draw posterior samples of each recipe's value (samples, recipes): its gain where it passes, else at most the
        gain that a proposal must exceed.

        A doubt that recipes share, such as about one path of the latents, is drawn once for all of them.
        """
        self._refit(history)
        recipes = [result.recipe for result in results]
        floor = floor_of(history, self.space.objective)
        gains = self.gain.draws(recipes, self.rng, NUM_SAMPLES)
        passes = self.rng.random(gains.shape) < [
            probability_of_running(recipe, self._blame) for recipe in recipes
        ]
        if not self.space.objective.same_picture_only:
            # A final draws the same images of all, so recipes of one path have the same luck.
            paths = [path_of(recipe) for recipe in recipes]
            drawn = self.rng.standard_normal(gains.shape)[:, [paths.index(path) for path in paths]]
            luck = drawn * [result.luck for result in results]
            passes &= self.slack.draws(recipes, self.rng, NUM_SAMPLES) + luck + _SLACK_AT_BEST > 0
        limit = self.space.objective.max_memory_bytes
        if limit is not None and self._base_memory is not None:
            memory = self.memory.draws(recipes, self.rng, NUM_SAMPLES)
            passes &= memory + self._base_memory < math.log(limit)
        for k, result in enumerate(results):
            if result.is_ruined:
                passes[:, k] = False
            elif result.rung is Rung.FINAL and result.gate is not None:
                passes[:, k] = result.gate is Gate.PASSED
        values: Array = np.where(passes, np.maximum(gains, floor), floor)
        return values

    def _most_promising(self, recipes: list[Recipe]) -> Recipe | None:
        """Return the recipe with the highest expected gain, however long it takes to measure, if there is time."""
        promises = self.gain.estimate(recipes)[0] * self._chance(recipes)
        if self.seconds_of is not None:
            promises[[self.seconds_of(recipe) > self.most_s() for recipe in recipes]] = 0.0
        return recipes[int(np.argmax(promises))] if promises.max() > _WORTH_BEGINNING else None

    def _best(self, results: Sequence[Result]) -> float:
        """Return the best gain so far, discounted by the doubts about its quality; the baseline counts 0."""
        floor = floor_of(results, self.space.objective)
        values = [floor]
        for result in results:
            if result.slack is not None or (result.is_measured and self.space.objective.same_picture_only):
                above = max(0.0, result.value(self.space.objective, failed=floor) - floor)
                values.append(floor + result.chance * above)
        return max(values)

    def promise(self, results: Sequence[Result], history: Sequence[Result]) -> list[float]:
        """Return each recipe's gain, discounted by the doubts about its quality, by the model's estimate: it pools all
        recipes, so that no single lucky measurement wins."""
        if not results:
            return []
        self._refit(history)
        recipes = [result.recipe for result in results]
        mean, _ = self.gain.estimate(recipes)
        chance = self._chance(recipes)
        # The posterior of a judged recipe includes its own images; after a final they alone count.
        own = [
            result.chance if result.rung is Rung.FINAL and result.slack is not None else float(chance[k])
            for k, result in enumerate(results)
        ]
        return [
            float(gain) * probability - _WORTH_OF_LESS * len(recipe.techniques)
            for gain, probability, recipe in zip(mean, own, recipes, strict=True)
        ]

    def shorter(self, recipe: Recipe, history: Sequence[Result]) -> Recipe:
        """Return the recipe without techniques expected to gain nothing."""
        self._refit(history)
        return self._without_idle(recipe, _GIVES_LITTLE, lambda less: True)

    def assemble(self, recipe: Recipe, history: Sequence[Result]) -> Recipe:
        """Add techniques that keep the path of the latents and are expected to gain more than 2 %: what was tried, and
        weights that declare how much they save."""
        self._refit(history)
        known = {option.text for option in self.space.options if option.facts.saved_share is not None}
        known = known.union(*(texts_of(result.recipe) for result in history if result.is_measured))
        current, most = recipe, _GIVES_LITTLE
        while True:
            near = [r for r in self.space.neighbours(current) if path_of(r) == path_of(recipe)]
            near = [r for r in near if texts_of(r) <= known | texts_of(recipe)]
            gain, _ = self.gain.estimate([recipe, *near])
            more = (gain - gain[0]) * self._chance([recipe, *near])
            which = int(np.argmax(more))
            if more[which] <= most:
                return current
            current, most = near[which - 1], float(more[which])

    def _trim(self, recipe: Recipe, results: Collection[Recipe]) -> Recipe:
        """Return a recipe of several new techniques without those expected to gain nothing.

        Another search's recipe is proposed as a whole, without techniques expected to gain nothing. Where only one
        technique is new, the rest is its context.
        """
        new = texts_of(recipe) - self._tested
        if len(new) < 2:
            return recipe
        return self._without_idle(
            recipe,
            _GIVES_NOTHING,
            lambda less: less not in results and bool(new & texts_of(less)),
        )

    def _without_idle(self, recipe: Recipe, little: float, allowed: Callable[[Recipe], bool]) -> Recipe:
        """Return the recipe without techniques that gain at most `little` (a logarithm), removing the smallest gain
        first."""
        while True:
            fewer = [recipe.without(technique) for technique in recipe]
            fewer = [
                less for less in fewer if not less.is_baseline and self.space.holds(less) and allowed(less)
            ]
            if not fewer:
                return recipe
            gain, _ = self.gain.estimate([recipe, *fewer])
            chance = self._chance([recipe, *fewer])
            idle = (gain[1:] > gain[0] - little) & (chance[1:] > _AS_LIKELY * chance[0])
            if not idle.any():
                return recipe
            recipe = fewer[int(np.argmax(np.where(idle, gain[1:], -np.inf)))]

    def _differs_by_one(self, recipe: Recipe) -> bool:
        """Whether at most one of its options is new, or all new ones were measured together elsewhere.

        In every second batch a new technique that changes the image is measured by itself, so that its effect on
        quality is visible; in the others it is added to a good recipe.
        """
        new = texts_of(recipe) - self._tested
        if len(new) > 1:
            return any(new <= ran for ran in self._ran)
        is_alone = len(texts_of(recipe) - texts_of(self.space.base())) == 1
        changes = any(technique.text in new and not technique.facts.same_picture for technique in recipe)
        if self._alone and changes and not is_alone:
            return False
        return all(
            technique.name in self._tested_names
            or technique.text in self._tested
            or technique.text in self._reported
            or is_usual(technique)
            for technique in recipe
        )

    def _score(self, recipes: list[Recipe], best: float) -> Array:
        mean, sd = self.gain.estimate(recipes)
        scores: Array = improvement(mean, sd, best) * self._chance(recipes)
        if self.seconds_of is not None:
            seconds = np.array([self.seconds_of(recipe) for recipe in recipes])
            scores = np.where(seconds > self.most_s(), 0.0, scores / seconds)
        return scores - 100.0 * self._unknown(recipes)

    def _unknown(self, recipes: list[Recipe]) -> Array:
        return np.array([0.0 if self._differs_by_one(recipe) else 1.0 for recipe in recipes])

    def _chance(self, recipes: list[Recipe]) -> Array:
        """Return the probability that each recipe runs and keeps the limits, at least a millionth."""
        chance = np.array([probability_of_running(recipe, self._blame) for recipe in recipes])
        mean, sd = self.slack.estimate(recipes)
        if not self.space.objective.same_picture_only:
            chance *= normal((mean + _SLACK_AT_BEST) / sd)
        limit = self.space.objective.max_memory_bytes
        if limit is not None and self._base_memory is not None:
            mean, sd = self.memory.estimate(recipes)
            chance *= normal((math.log(limit) - self._base_memory - mean) / sd)
        probability: Array = np.maximum(chance, 1e-6)
        return probability


def _expected_slack(technique: Technique) -> Prior:
    if technique.facts.same_picture:
        return _SLACK_OF_SAME
    if technique.facts.saved_share is not None:
        return _SLACK_OF_REPLACED
    return _SLACK_OF_CHANGES if technique.facts.trained_steps is None else _SLACK_OF_TRAINED


def improvement(mean: Array, sd: Array, best: float) -> Array:
    """Return the expected improvement over `best` of normally distributed values.

    Mockus, Tiesis and Zilinskas, The Application of Bayesian Methods, 1978.
    """
    z = (mean - best) / sd
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    expected: Array = (mean - best) * normal(z) + sd * density
    return np.maximum(expected, 0.0)


def normal(z: Array) -> Array:
    return np.array([0.5 * (1 + math.erf(float(x) / math.sqrt(2))) for x in np.atleast_1d(z)])


@lru_cache(maxsize=100_000)
def texts_of(recipe: Recipe) -> frozenset[str]:
    return frozenset(technique.text for technique in recipe)


def failure_probabilities(history: Sequence[Result]) -> dict[frozenset[str], float]:
    """Return the probability that each technique, alone or in pairs, makes recipes fail.

    For a recipe with ruined images these are the techniques that were in no recipe of passing quality.
    """
    good: set[frozenset[str]] = set()
    kept: set[str] = set()
    for result in history:
        if result.is_measured:
            good |= _parts(result.recipe)
        if result.slack is not None and result.gate is not Gate.FAILED:
            kept |= texts_of(result.recipe)
    blame: dict[frozenset[str], float] = {}
    for result in history:
        # A recipe that misses the limit by less may pass with other techniques: ending guidance gives back what a cache
        # loses.
        if result.gate is Gate.FAILED and (result.slack is None or result.slack < -RUINED):
            suspected = texts_of(result.recipe) - kept
            for text in suspected:
                part = frozenset((text,))
                blame[part] = max(blame.get(part, 0.0), _SURE / len(suspected))
    for result in history:
        if result.is_measured or result.outcome in (Outcome.FAILED_QUALITY, Outcome.OUT_OF_MEMORY):
            continue
        suspects = _parts(result.recipe) - good
        for part in suspects:
            weight = 0.5 if result.outcome in _NOT_YET else 1.0
            # Each failure adds to the blame, so that the common part of all of them is soon avoided.
            blame[part] = 1 - (1 - blame.get(part, 0.0)) * (1 - _SURE * weight / len(suspects))
    return blame


def _parts(recipe: Recipe) -> set[frozenset[str]]:
    texts = texts_of(recipe)
    return {frozenset((a, b)) for a in texts for b in texts}


def probability_of_running(recipe: Recipe, blame: dict[frozenset[str], float]) -> float:
    probability = 1.0
    if blame:
        for part in _parts(recipe):
            probability *= 1 - blame.get(part, 0.0)
    return probability
