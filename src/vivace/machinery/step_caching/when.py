"""When a step is skipped: schedules, masks, and thresholds on what changes. Each is an `engine.IsHit`."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vivace.errors import UsageError
from vivace.foundation.untrusted.files import read_object, user_path
from vivace.machinery.step_caching.engine import CacheState, IsHit, Look, relative_change

COMPUTED, DECIDED, HIT = "c", "d", "h"
_RUN = re.compile(rf"(\d*)([{COMPUTED}{DECIDED}{HIT}])")
_MOST_STEPS = 1000
_DIGITS = str.maketrans("10", COMPUTED + HIT)


def evenly_spaced(share: float) -> IsHit:
    """Make this share of the steps hits, evenly spaced, but never the first step."""

    def is_hit(state: CacheState, _: Look) -> bool:
        step = state.step
        return step > 0 and math.floor(step * share) > math.floor((step - 1) * share)

    return is_hit


def never(_: CacheState, __: Look) -> bool:
    """Compute every step."""
    return False


def masked(mask: str, num_steps: Callable[[], int | None]) -> IsHit:
    """Follow a mask of `read_mask`; one with a digit for each step is for that many steps alone."""
    steps = steps_of(mask)

    def is_hit(state: CacheState, _: Look) -> bool:
        number = num_steps() if mask.isdigit() else None
        if number not in (None, len(steps)):
            raise UsageError(
                f"the mask is for {len(steps)} steps, and this call has {number}; give that many "
                "num_inference_steps, or a mask of runs such as 4c2h1c, which repeat"
            )
        return of_step(steps, state.step) == HIT

    return is_hit


def since_computed(interval: int, is_allowed: Callable[[CacheState], bool] = lambda _: True) -> IsHit:
    """Compute every so many steps one, counted from the last computed one, where `is_allowed` lets a step be a hit."""

    def is_hit(state: CacheState, _: Look) -> bool:
        may_hit = bool(state.kept) and is_allowed(state)
        since: int = (state.notes["since"] + 1) % interval if may_hit else 0
        state.notes["since"] = since
        return since != 0

    return is_hit


@dataclass(frozen=True)
class AccumulatedChange:
    """Skip steps while the changes since the last computed one add up to less than a threshold.

    Every step is compared with the one before, computed or not. The first and the last step are computed. `seen` is
    what is compared, `rescaled` what is added of a relative change.
    """

    threshold: float
    num_steps: Callable[[], int | None]
    seen: Callable[[CacheState, Look], Any] = lambda _, look: look()
    rescaled: Callable[[float], float] = lambda change: change
    max_skip: int | None = None

    def __call__(self, state: CacheState, look: Look) -> bool:
        notes = state.notes
        if state.step + 1 == self.num_steps():
            notes.clear()  # or it would take memory while the VAE decodes
            return False
        now, before = self.seen(state, look), notes.get("seen")
        notes["seen"] = now
        is_hit = False
        if state.kept and before is not None and notes["skipped"] != self.max_skip:
            notes["distance"] += self.rescaled(relative_change(now, before))
            is_hit = bool(notes["distance"] < self.threshold)
        notes["skipped"] = notes["skipped"] + 1 if is_hit else 0
        if not is_hit:
            notes["distance"] = 0.0
        return is_hit


@dataclass(frozen=True)
class KnownGrowth:
    """Skip steps while the last residual, by a table of how residuals grow, stays close to the true one.

    Attributes:
        threshold: bound of the sum of the skipped steps' errors, each the distance of the ratios' product from 1.
        retention: share of the steps, at the beginning, that are computed.
        num_before: returns the steps of the schedule's beginning that are not run: the table is that of a whole
            schedule.
    """

    ratio_at: Callable[[int, int], float]
    threshold: float
    max_skip: int
    retention: float
    num_steps: Callable[[], int]
    num_before: Callable[[], int]

    def __call__(self, state: CacheState, _: Look) -> bool:
        num_steps, num_before = self.num_steps(), self.num_before()
        if state.step < int(self.retention * num_steps + 0.5):
            return False
        ratio, error, skipped = state.notes.get("skipped", (1.0, 0.0, 0))
        ratio *= self.ratio_at(num_before + state.step, num_before + num_steps)
        error, skipped = error + abs(1 - ratio), skipped + 1
        is_hit = bool(state.kept) and error <= self.threshold and skipped <= self.max_skip
        state.notes["skipped"] = (ratio, error, skipped) if is_hit else (1.0, 0.0, 0)
        return is_hit


def read_mask(text: str) -> str:
    """Return a mask in the form in which recipes hold it: digits as they are, else runs of letters.

    Args:
        text: a mask, or the name of a file of `vivace calibrate schedule`.

    Raises:
        ValueError: it is no mask, or the file has none.
    """
    if text.endswith(".json"):
        content = read_object(user_path(text))
        if not isinstance(content.get("mask"), str):
            raise ValueError(f"{text} has no mask; give a file of vivace calibrate schedule")
        text = content["mask"]
    steps = steps_of(text)
    if text.strip().isdigit():
        return text.strip()
    return "".join(f"{len(list(run))}{letter}" for letter, run in itertools.groupby(steps))


def steps_of(mask: str) -> str:
    """Parse a mask into one letter a step: "4c2h" is "cccchh", as is "111100".

    Raises:
        ValueError: it is not a mask, or its first step is not computed.
    """
    letters = mask.strip().lower()
    if letters and set(letters) <= {"0", "1"}:
        letters = letters.translate(_DIGITS)
    runs = [(int(number or 1), letter) for number, letter in _RUN.findall(letters)]
    if not runs or _RUN.sub("", letters) or any(number < 1 for number, _ in runs):
        raise ValueError(
            f"{mask!r} is not a mask of steps; write runs of c (computed), d (decided) and h (hit), such as 4c2h1c, "
            "or a digit for each step, 1 if it is computed"
        )
    if sum(number for number, _ in runs) > _MOST_STEPS:
        raise ValueError(f"the mask has more than {_MOST_STEPS} steps")
    if runs[0][1] != COMPUTED:
        raise ValueError(f"the first step has nothing to reuse; begin the mask with c, such as 1c{letters}")
    return "".join(number * letter for number, letter in runs)


def of_step(steps: str, step: int) -> str:
    """Return a step's letter. Behind the mask's end, what follows its first run is repeated."""
    repeated = steps.lstrip(COMPUTED)
    if step < len(steps) or not repeated:
        return steps[min(step, len(steps) - 1)]
    return repeated[(step - len(steps)) % len(repeated)]
