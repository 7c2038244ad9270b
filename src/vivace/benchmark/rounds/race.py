"""A quick race between recipes with short calls. It picks a candidate; its times are not stored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from vivace.errors import NoEffect, Unsupported
from vivace.models.find import find_model
from vivace.recipes.resolve import resolve
from vivace.runtime.opening import open_session
from vivace.runtime.session import Session

_STEPS = 10
_ROUNDS = 4
_TOO_SLOW = 3.0  # recipes slower than this multiple of the fastest are dropped after the first call


def race(model: str, recipes: Sequence[str], device: str) -> dict[str, float]:
    """Return each recipe's best time for a call of a few steps, seconds. Calls are interleaved.

    Recipes that are unsupported here, change nothing, or are far slower than the fastest (fp16 on a CPU that emulates
    it) are left out.
    """
    located = find_model(model)
    sessions: dict[str, Session] = {}
    for recipe in recipes:
        try:
            sessions[recipe] = open_session(located, resolve(recipe), device, {"num_inference_steps": _STEPS})
        except (Unsupported, NoEffect):
            continue
    # Two steps without decoding find the recipes that are too slow. Twice, since the
    # first call also loads kernels.
    short = {"num_inference_steps": 2, "output_type": "latent"}
    short_s = {recipe: min(_time(s, **short), _time(s, **short)) for recipe, s in sessions.items()}
    remaining = [recipe for recipe in sessions if short_s[recipe] <= _TOO_SLOW * min(short_s.values())]
    rounds = [{recipe: _time(sessions[recipe]) for recipe in remaining} for _ in range(_ROUNDS)]
    return {recipe: min(times[recipe] for times in rounds) for recipe in remaining}


def _time(session: Session, **call: Any) -> float:
    start = time.perf_counter()
    session("a red circle", **call)
    return time.perf_counter() - start
