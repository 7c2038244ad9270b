"""The share of the time that a technique works on, which depends on the other techniques.

Effects are logarithms of gains over the baseline, which add up only while shares stay as they are. A tiny VAE takes 5 %
off a call of 25 steps and 30 % off one of 4. Measured stages give the remaining share of each component. `steps`
replaces the number of steps that weights were trained for, so the gains of both do not add up either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vivace.machinery.technique import Technique
from vivace.recipes.recipe import Recipe
from vivace.techniques.steps import Steps
from vivace.tuning.model.priors import touched_share
from vivace.tuning.search.results import Result, Rung

_LARGEST_SHARE = 0.9
_LEAST, _MOST = 0.1, 10.0
"""Bounds of a weight: shares of single calls are noisy."""
_BESIDE_STEPS = 0.3
"""Remaining effect of distilled weights where `steps` sets another number: most of them need no guidance."""


@dataclass(frozen=True)
class Leverage:
    """The reach of techniques, from measured stages.

    Attributes:
        baseline: the baseline's seconds by stage; empty if unknown.
        stages: of recipes that change the times of stages, by their techniques; recipes with the most techniques come
            first.
    """

    baseline: Mapping[str, float] = field(default_factory=dict)
    stages: tuple[tuple[frozenset[Technique], Mapping[str, float]], ...] = ()

    @classmethod
    def of(cls, results: Sequence[Result]) -> Leverage:
        """Read the stages of results.

        Recipes that keep the image are screened with a few steps, and so are their stages.
        """
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
        """Return the effect of a recipe's technique in shares of its effect on the baseline.

        Args:
            targets: components that the effect is of.
        """
        others = frozenset(recipe.techniques) - {technique}
        if technique.facts.trained_steps is not None and any(isinstance(other, Steps) for other in others):
            return _BESIDE_STEPS
        beside = next((stages for techniques, stages in self.stages if techniques <= others), None)
        if beside is None or not self.baseline:
            return 1.0
        alone = _reach(targets, self.baseline)
        return min(max(_reach(targets, beside) / alone, _LEAST), _MOST) if alone else 1.0


def _reach(targets: Sequence[str], stages_s: Mapping[str, float]) -> float:
    """Return the logarithm of the gain if these components took no time."""
    return -math.log(1 - min(touched_share(targets, stages_s), _LARGEST_SHARE))
