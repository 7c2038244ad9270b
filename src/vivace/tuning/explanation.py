"""A search's posterior of each technique at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vivace.recipes.recipe import Recipe
from vivace.report.value_text import count
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
        num_left_out: options that were left out before anything was timed.
    """

    beliefs: tuple[ExpectedGain, ...] = ()
    num_unknown: int = 0
    sources: tuple[tuple[str, int], ...] = ()
    num_left_out: int = 0

    def lines(self) -> list[str]:
        """Return the explanation as lines of text."""
        width = max((len(belief.technique) for belief in self.beliefs), default=0)
        lines = [
            f"{belief.technique:<{width}}  {belief.times:.2f}x [{belief.low:.2f}, {belief.high:.2f}]"
            f"{'' if belief.was_tried else '  not tried here'}"
            for belief in self.beliefs
        ]
        if self.num_unknown:
            text = "option was not tried, and nothing tells whether it helps"
            if self.num_unknown > 1:
                text = "options were not tried, and nothing tells whether they help"
            lines.append(f"{self.num_unknown} more {text} here")
        lines += [f"from {name}: {count(number, 'figure')}" for name, number in self.sources]
        if self.num_left_out:
            were = "option was" if self.num_left_out == 1 else "options were"
            lines.append(f"{self.num_left_out} {were} left out before timing (--format json says why)")
        return lines


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
        len(search.space.cut),
    )


def is_telling(belief: ExpectedGain) -> bool:
    """Whether a posterior is informative: the technique was tried, or its interval lies on one side of 1."""
    return belief.was_tried or belief.low > 1 or belief.high < 1
