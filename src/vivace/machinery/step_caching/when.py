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
from vivace.machinery.step_caching.engine import (
    CacheState,
    IsHit,
    Look,
    number_of_steps,
    relative_change,
    steps_before,
)

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
    return False


class Masked:
    """Follows a mask of `read_mask`. One with a digit for each step is for a schedule of that many steps: a call that
    begins within it, as from an image, follows its end, and a longer one is refused. Without `pipe` it is never
    longer."""

    def __init__(self, mask: str, pipe: Any = None) -> None:
        self._steps, self._is_whole, self._pipe = steps_of(mask), mask.isdigit(), pipe
        self._longest = 0

    def __call__(self, state: CacheState, _: Look) -> bool:
        before = 0
        if self._is_whole and self._pipe is not None and (number := number_of_steps(self._pipe)) is not None:
            before = steps_before(self._pipe)
            self._longest = max(self._longest, before + number)
            if self._longest > len(self._steps):
                raise UsageError(self._unlike())
        return of_step(self._steps, before + state.step) == HIT

    def refuted(self) -> str | None:
        """Return that no call had as many steps as the mask, so that another part of it was followed than was meant."""
        return self._unlike() if 0 < self._longest < len(self._steps) else None

    def _unlike(self) -> str:
        number = len(self._steps)
        return (
            f"the mask is for {number} steps, and the call had {self._longest}; give {number} steps, or a mask of runs "
            "such as 4c2h1c, which repeat"
        )


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
    """Skip steps while the last residual, by a table of how residuals grow, stays close to the true one: the skipped
    steps' errors, each the distance of the ratios' product from 1, add up to at most `threshold`. A share of the steps,
    at the beginning, is computed; `num_before` is the number of the schedule's steps that are not run."""

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
    """Return a mask, or a calibrated file's, as recipes hold it: digits, else runs of letters. ValueError: it is
    none."""
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
    """Parse a mask into one letter a step: "4c2h" is "cccchh", as is "111100". ValueError: it is none."""
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
