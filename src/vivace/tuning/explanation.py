"""A search's posterior of each technique at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vivace.recipes.recipe import Recipe
from vivace.tuning.model.priors import PriorSource
from vivace.tuning.search.search import Search

_MOST = 16
_CONFIDENT = 1.96


@dataclass(frozen=True)
class ExpectedGain:
    """The posterior of a technique's gain: how many times as fast a recipe is with it, with a 95 % interval."""

    technique: str
    times: float
    low: float
    high: float
    was_tried: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "technique": self.technique,
            "times": self.times,
            "ci95": [self.low, self.high],
            "tried": self.was_tried,
        }


@dataclass(frozen=True)
class Explanation:
    """The posterior gains, and their sources.

    Attributes:
        beliefs: the gains of techniques that were tried or that earlier figures decide, the best first.
        num_unknown: number of options that were not tried and that no earlier figure decides.
        sources: earlier figures, by source.
    """

    beliefs: tuple[ExpectedGain, ...] = ()
    num_unknown: int = 0
    sources: tuple[tuple[str, int], ...] = ()


def explanation_of(search: Search, sources: Sequence[PriorSource]) -> Explanation:
    """Return the posterior of the search's model."""
    tried = {technique for result in search.history if result.is_measured for technique in result.recipe}
    options = list(dict.fromkeys([*tried, *search.space.options]))
    gains = search.sampler.expected_gains([Recipe((option,)) for option in options], search.history)
    beliefs = []
    for option, (effect, error) in zip(options, gains, strict=True):
        low, high = (math.exp(effect + sign * _CONFIDENT * error) for sign in (-1, 1))
        beliefs.append(ExpectedGain(option.text, math.exp(effect), low, high, option in tried))
    telling = [belief for belief in beliefs if is_telling(belief)]
    return Explanation(
        tuple(sorted(telling, key=lambda belief: (-belief.times, belief.technique))[:_MOST]),
        len(beliefs) - len(telling),
        tuple((source.name, len(source.data)) for source in sources if source.data),
    )


def is_telling(belief: ExpectedGain) -> bool:
    """Whether a posterior is informative: the technique was tried, or its interval lies on one side of 1."""
    return belief.was_tried or belief.low > 1 or belief.high < 1
