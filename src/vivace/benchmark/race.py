"""A quick race between recipes: seconds for a short picture of each. For picking a candidate, not for a record."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from vivace.errors import NoEffect, Unsupported
from vivace.models.find import find_model
from vivace.recipes.resolve import resolve
from vivace.runtime.session import Session, open_session

_STEPS = 10
_ROUNDS = 4
_HOPELESS = 3.0  # times the leader's time; such a recipe runs no further


def race(model: str, recipes: Sequence[str], device: str) -> dict[str, float]:
    """The best time of each recipe for a picture of a few steps; interleaved.

    Left out are recipes that are unsupported here, change nothing, or are hopelessly slow (fp16 on a CPU that
    emulates it).
    """
    found = find_model(model)
    sessions: dict[str, Session] = {}
    for recipe in recipes:
        try:
            sessions[recipe] = open_session(found, resolve(recipe), device, {"num_inference_steps": _STEPS})
        except (Unsupported, NoEffect):
            continue
    # One step without decoding, twice (the first call also loads kernels), tells who is hopeless.
    short = {"num_inference_steps": 1, "output_type": "latent"}
    trial = {recipe: min(_time(s, **short), _time(s, **short)) for recipe, s in sessions.items()}
    hopeful = [recipe for recipe in sessions if trial[recipe] <= _HOPELESS * min(trial.values())]
    rounds = [{recipe: _time(sessions[recipe]) for recipe in hopeful} for _ in range(_ROUNDS)]
    return {recipe: min(times[recipe] for times in rounds) for recipe in hopeful}


def _time(session: Session, **call: Any) -> float:
    start = time.perf_counter()
    session("a red circle", **call)
    return time.perf_counter() - start
