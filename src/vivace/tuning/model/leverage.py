"""What a technique may gain beside others: the share of the time that it works on, and the waits that it ends.

Effects are logarithms of gains over the baseline, which add up only while shares stay as they are. A tiny VAE takes 5 %
off a call of 25 steps and 30 % off one of 4. Measured stages give the remaining share of each component. `steps`
replaces the number of steps that weights were trained for, so the gains of both do not add up either.

A GPU that waits for the CPU to launch its kernels gains about the waiting time from a replay of CUDA graphs, which is a
single launch. A trace tells the waits before that is tried. They depend on the host, so records of captured recipes
from other hosts count less where this one is slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from vivace.machinery.technique import Technique, Trait
from vivace.recipes.recipe import Recipe
from vivace.techniques.steps import Steps
from vivace.tuning.model.priors import touched_share
from vivace.tuning.model.regression import Datum
from vivace.tuning.search.results import Result, Rung
from vivace.tuning.search.space import with_option

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
