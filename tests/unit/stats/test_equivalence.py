"""Tests of equivalence decide as often as they promise."""

import numpy as np

from vivace.foundation.stats import Equivalence, equivalence

PROMPTS = [prompt for prompt in range(13) for _ in range(3)]


def _differences(random: np.random.Generator, mean: float, spread: float = 0.1) -> list[float]:
    """Return differences of which those of a prompt go together."""
    by_prompt = random.normal(0, spread, 13)
    return [mean + by_prompt[prompt] + random.normal(0, spread / 2) for prompt in PROMPTS]


def _share(mean: float, verdict: Equivalence, trials: int = 400) -> float:
    random = np.random.default_rng(0)
    results = [equivalence(_differences(random, mean), PROMPTS, 0.2).verdict for _ in range(trials)]
    return results.count(verdict) / trials


def test_a_difference_at_the_margin_is_within_it_in_few_cases() -> None:
    assert _share(0.2, Equivalence.WITHIN) < 0.08
    assert _share(0.2, Equivalence.ABOVE) < 0.03


def test_no_difference_is_within_and_a_large_one_is_beyond() -> None:
    assert _share(0.0, Equivalence.WITHIN) > 0.97
    assert _share(-0.4, Equivalence.BELOW) > 0.97
    assert _share(0.0, Equivalence.BELOW) == 0


def test_few_prompts_are_unclear_and_say_how_many_decide() -> None:
    random = np.random.default_rng(1)
    noisy = [float(value) for value in random.normal(0, 0.8, 13)]
    test = equivalence(noisy, range(13), 0.2)
    assert test.verdict is Equivalence.UNCLEAR
    assert test.needed is not None
    assert test.needed > 13
    more = [float(value) for value in random.normal(0, 0.8, 2 * test.needed)]
    assert equivalence(more, range(len(more)), 0.2).verdict is Equivalence.WITHIN
    assert equivalence([0.3, 0.1], [0, 1], 0.2).needed == 6
