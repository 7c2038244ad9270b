"""The recipes that a search measured, and the reason why each is not its answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vivace.foundation.spec.record import Outcome
from vivace.foundation.stats import Gate
from vivace.tuning.search.objective import Objective
from vivace.tuning.search.results import Result, Rung, latest


@dataclass(frozen=True)
class ExplainedResult:
    """A recipe of the search.

    Attributes:
        is_pick: whether it is the answer.
        reason: why it is not; "" for the answer and for the baseline.
    """

    result: Result
    is_pick: bool
    reason: str

    @property
    def measured_how(self) -> str:
        """How thoroughly it was measured."""
        if not self.result.is_measured:
            return self.result.outcome.value.replace("_", " ")
        return {
            Rung.SCREENED: "screened: a few calls",
            Rung.JUDGED: f"judged by {self.result.images} images",
            Rung.FINAL: "final, beside the baseline",
        }[self.result.rung]


def explained_results(
    history: Sequence[Result], pick: Result | None, objective: Objective, judges: bool
) -> list[ExplainedResult]:
    """Return the attempts, the answer first, then by the gain; recipes that were not measured come last.

    Recipes that were refused before anything ran are left out.
    """
    tried = []
    for result in latest(history).values():
        if result.outcome is Outcome.UNSUPPORTED:
            continue
        is_pick = pick is not None and result.recipe == pick.recipe
        silent = is_pick or result.recipe.is_baseline
        tried.append(
            ExplainedResult(result, is_pick, "" if silent else why_lost(result, pick, objective, judges))
        )
    return sorted(
        tried, key=lambda result: (not result.is_pick, -_gain(result.result), result.result.recipe.text)
    )


def why_lost(result: Result, pick: Result | None, objective: Objective, judges: bool) -> str:
    """Describe why a recipe is not the pick, or why it cannot be one where there is no pick."""
    if not result.is_measured:
        return f"{result.outcome.value.replace('_', ' ')}: {result.reason}"
    if result.gate is Gate.FAILED or result.is_ruined:
        return "its quality fails"
    memory, first = objective.max_memory_bytes, objective.max_first_call_s
    if memory is not None and (result.peak_bytes or 0) > memory:
        return "it takes more memory than allowed"
    if first is not None and (result.first_call_s or 0) > first:
        return "its first call takes longer than allowed"
    if pick is None:
        return _why_not_proved(result, judges)
    slower = math.exp((pick.gain or 0.0) - (result.gain or 0.0)) - 1
    noise = math.hypot(result.error, pick.error)
    if slower > max(1.0, 2 * noise):
        return f"{1 + slower:.1f} times the {'memory' if objective.measures_memory else 'time'}"
    if slower > 2 * noise:
        return f"{100 * slower:.0f} % {'more memory' if objective.measures_memory else 'slower'}"
    if judges and result.gate is not Gate.PASSED:
        return "as fast within the noise; its quality is not proven"
    if slower > 0:
        return f"{100 * slower:.1f} % slower, within the noise"
    return "as fast within the noise when screened; not in the final"


def _why_not_proved(result: Result, judges: bool) -> str:
    if _gain(result) <= 0:
        return "no better than the baseline"
    if judges and result.gate is Gate.UNCLEAR:
        return "better; its quality is not proven"
    if judges and result.gate is None:
        return "better; there was no time to judge its quality"
    if result.rung is Rung.FINAL:
        return "no better than the baseline beyond the noise"
    return "better; there was no time to prove it beside the baseline"


def _gain(result: Result) -> float:
    return -math.inf if result.gain is None else result.gain
