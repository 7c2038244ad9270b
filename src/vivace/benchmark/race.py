"""A quick race between recipes: seconds for a short call of each. For picking a candidate, not for a record."""

from __future__ import annotations

import time
from collections.abc import Sequence

from vivace.errors import NoEffect, Unsupported
from vivace.models.find import find_model
from vivace.runtime.session import Session, open_session
from vivace.techniques.resolve import resolve

_STEPS = 5
_ROUNDS = 5
_HOPELESS = 3.0  # times the leader's time; such a recipe runs no further


def race(model: str, recipes: Sequence[str], device: str) -> dict[str, float]:
    """The best time of each recipe for a call of a few steps, latents only; interleaved.

    Recipes that are unsupported here or change nothing are left out.
    """
    found = find_model(model)
    sessions: dict[str, Session] = {}
    for recipe in recipes:
        try:
            sessions[recipe] = open_session(found, resolve(recipe), device, {"num_inference_steps": _STEPS})
        except (Unsupported, NoEffect):
            continue
    best: dict[str, float] = {}
    for round_index in range(_ROUNDS + 1):
        for recipe, session in sessions.items():
            if best.get(recipe, 0.0) > _HOPELESS * min(best.values(), default=0.0):
                continue
            start = time.perf_counter()
            session("a red circle", output_type="latent")
            passed = time.perf_counter() - start
            # The first call of each only warms it up, but tells who is hopeless.
            best[recipe] = passed if round_index <= 1 else min(best[recipe], passed)
    return best
