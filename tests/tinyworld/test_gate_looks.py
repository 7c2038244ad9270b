"""Looking again where the gate is unclear: what decides, and that simulated recipes lie where verdicts are wrong."""

import numpy as np

from tinyworld.gate_looks import LOOKS, PLAIN, STRICTER, at_limit, look, resampled
from vivace.foundation.stats import Gate
from vivace.report.fidelity import CAP

PROMPTS = [f"prompt {k % 13}" for k in range(39)] + [f"caption {k}" for k in range(61)]


def shares(mean: float, spread: float) -> np.ndarray:
    return mean + spread * np.random.default_rng(1).standard_normal(LOOKS[-1])


def test_more_images_decide_what_39_leave_unclear() -> None:
    ruined = shares(0.965, 0.12)
    assert look(ruined, PROMPTS, 0.985, PLAIN[:1]) is Gate.UNCLEAR
    assert look(ruined, PROMPTS, 0.985, PLAIN) is Gate.FAILED
    assert look(shares(1.0, 0.001), PROMPTS, 0.985, STRICTER) is Gate.PASSED


def test_later_looks_ask_for_more_and_the_first_decides() -> None:
    assert STRICTER[0] == PLAIN[0]
    assert all(strict > other for strict, other in zip(STRICTER[1], PLAIN[1], strict=True))
    good_then_ruined = np.concatenate([shares(1.0, 0.001)[:39], shares(0.5, 0.001)[39:]])
    assert look(good_then_ruined, PROMPTS, 0.985, PLAIN) is Gate.PASSED


def test_a_simulated_recipe_lies_at_the_limit() -> None:
    moved = at_limit(shares(0.9, 0.2), 0.985)
    assert abs(moved.clip(1 - CAP, 1 + CAP).mean() - 0.985) < 1e-6
    drawn, names = resampled(shares(0.9, 0.2), None, np.random.default_rng(0))
    assert len(drawn) == len(names) == LOOKS[-1]
    assert len(set(names)) == 13 + 61
