"""The recipes that a search measured, and why each is not its answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vivace.spec.record import Outcome
from vivace.stats import Gate
from vivace.tuning.seen import Rung, Seen, latest
from vivace.tuning.wanted import Wanted


@dataclass(frozen=True)
class Tried:
    """A recipe of the search.

    Attributes:
        is_pick: whether it is the answer.
        reason: why it is not; "" for the answer and for the baseline.
    """

    seen: Seen
    is_pick: bool
    reason: str

    @property
    def measured_how(self) -> str:
        """How thoroughly it was measured."""
        if not self.seen.is_measured:
            return self.seen.outcome.value.replace("_", " ")
        return {
            Rung.SCREENED: "screened: a few calls",
            Rung.JUDGED: "judged by few images",
            Rung.PROVEN: "final, beside the baseline",
        }[self.seen.rung]


def tried_of(history: Sequence[Seen], pick: Seen | None, wanted: Wanted, judges: bool) -> list[Tried]:
    """Return what was tried, the answer first, then by the gain; what was not measured comes last.

    Recipes that were refused before anything ran are left out.
    """
    found = []
    for one in latest(history).values():
        if one.outcome is Outcome.UNSUPPORTED:
            continue
        is_pick = pick is not None and one.recipe == pick.recipe
        silent = is_pick or one.recipe.is_baseline
        found.append(Tried(one, is_pick, "" if silent else why_lost(one, pick, wanted, judges)))
    return sorted(found, key=lambda one: (not one.is_pick, -_gain(one.seen), one.seen.recipe.text))


def why_lost(one: Seen, pick: Seen | None, wanted: Wanted, judges: bool) -> str:
    """Say why a recipe is not the pick, or why it is no pick where there is none."""
    if not one.is_measured:
        return f"{one.outcome.value.replace('_', ' ')}: {one.reason}"
    if one.gate is Gate.FAILED or one.is_ruined:
        return "its quality fails"
    memory, first = wanted.max_memory_bytes, wanted.max_first_call_s
    if memory is not None and (one.peak_bytes or 0) > memory:
        return "it takes more memory than allowed"
    if first is not None and (one.first_call_s or 0) > first:
        return "its first call takes longer than allowed"
    if pick is None:
        return _why_not_proved(one, judges)
    slower = math.exp((pick.gain or 0.0) - (one.gain or 0.0)) - 1
    noise = math.hypot(one.error, pick.error)
    if slower > max(1.0, 2 * noise):
        return f"{1 + slower:.1f} times the {'memory' if wanted.measures_memory else 'time'}"
    if slower > 2 * noise:
        return f"{100 * slower:.0f} % {'more memory' if wanted.measures_memory else 'slower'}"
    if judges and one.gate is not Gate.PASSED:
        return "as fast within the noise; its quality is not proven"
    if slower > 0:
        return f"{100 * slower:.1f} % slower, within the noise"
    return "as fast within the noise when screened; not in the final"


def _why_not_proved(one: Seen, judges: bool) -> str:
    if _gain(one) <= 0:
        return "no better than the baseline"
    if judges and one.gate is Gate.UNCLEAR:
        return "better; its quality is not proven"
    if judges and one.gate is None:
        return "better; there was no time to judge its quality"
    if one.rung is Rung.PROVEN:
        return "no better than the baseline beyond the noise"
    return "better; there was no time to prove it beside the baseline"


def _gain(one: Seen) -> float:
    return -math.inf if one.gain is None else one.gain
