"""Results of recipes: measured here, in an earlier run, or on another machine; who measures, and who watches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from statistics import NormalDist
from typing import Any, Protocol

from vivace.errors import RecipeError
from vivace.evidence.choice import simplest_of_best
from vivace.foundation.spec.limits import Limits
from vivace.foundation.spec.record import Outcome, Record
from vivace.foundation.stats import Gate
from vivace.foundation.stats.intervals import Interval, student_t
from vivace.recipes.recipe import Recipe
from vivace.report.rows import Row
from vivace.tuning.search.objective import Objective

RUINED = 0.15
"""Gap to the limit on a few images beyond which a recipe is dropped."""
_LEAST_ERROR = 0.01
_UNKNOWN_ERROR = 0.08  # of one round without an interval
_DISTURBED_ERROR = 0.10
_PROVEN_ERROR = 0.004  # error of a slack: what another build of a library, or another seed, makes of it
_LUCK = 0.01  # of a final's images, where none of the recipe's were seen yet
_SURE = 0.95  # of the bounds that a judgement before the final has
_LEAST_LUCK = 0.004
ANY_GAIN = -3.0
_AS_FAST, _NOISE = 0.01, 0.03
"""Gap, as a logarithm, within which a shorter recipe counts as equally fast: always, and within its interval."""
_ANOTHER = 0.005
"""The same for a shorter recipe that is not part of the best one."""


class Rung(IntEnum):
    """How thoroughly a recipe was measured."""

    SCREENED = 0
    """A few calls; steps reduced where the technique does the same in each step. No quality."""
    JUDGED = 1
    """Full steps, and the fewest prompts that the gate accepts."""
    FINAL = 2
    """Interleaved with the baseline in several rounds; quality by the images of the final."""


@dataclass(frozen=True)
class Result:
    """One recipe's result.

    Attributes:
        gain: logarithm of the goal's improvement over the baseline beside it: time or memory, more is better.
        error: its standard error.
        slack: the margin of quality above its limit at the lower bound of its interval; negative below it. For few
            images, as expected for all images of the final.
        slack_error: its standard error, by the images seen so far.
        luck: standard deviation of what the final's further images add to it, however many were seen before.
        images: that quality was judged by.
        own_error: standard error of the logarithm of its own figure, beside others of its comparison; 0 if unknown.
        seconds, peak_bytes, first_call_s: measured; `seconds` per image.
        stages_s: seconds per image by stage.
        reason: why it was not measured, or why quality failed.
        busy_share: share of its time in which the GPU was busy, in a traced call; None if unknown.
        least_gain: lower end of the gain's 95 % interval; None if unknown, or if the gain needs none, as of memory.
    """

    recipe: Recipe
    outcome: Outcome
    rung: Rung
    gain: float | None = None
    error: float = _UNKNOWN_ERROR
    slack: float | None = None
    gate: Gate | None = None
    seconds: float | None = None
    peak_bytes: float | None = None
    first_call_s: float | None = None
    stages_s: tuple[tuple[str, float], ...] = ()
    reason: str | None = None
    slack_error: float = _PROVEN_ERROR
    luck: float = _LUCK
    images: int = 0
    busy_share: float | None = None
    own_error: float = 0.0
    least_gain: float | None = None

    @property
    def is_measured(self) -> bool:
        return self.outcome is Outcome.MEASURED and self.gain is not None

    @property
    def is_ruined(self) -> bool:
        """Whether quality has failed, or will at any number of images."""
        return self.gate is Gate.FAILED or (self.slack is not None and self.slack < -RUINED)

    @property
    def verdict(self) -> str:
        """The verdict on its images, and of how many images it is before the final; "" without one."""
        of = "" if self.rung is Rung.FINAL or not self.images else f" by {self.images} images"
        return "" if self.gate is None else f"{self.gate.value}{of}"

    @property
    def own_gain(self) -> float:
        """The gain; the smallest possible if it was not measured."""
        return -math.inf if self.gain is None else self.gain

    @property
    def outcome_in_words(self) -> str:
        return self.outcome.value.replace("_", " ")

    @property
    def chance(self) -> float:
        """The probability that the quality passes in full, by the recipe's own figures alone."""
        is_final = self.rung is Rung.FINAL
        if self.slack is None or (is_final and self.gate is Gate.PASSED):
            return 1.0
        if self.gate is Gate.FAILED:
            return 0.0
        error = max(self.luck, _LEAST_LUCK) if is_final else math.hypot(self.slack_error, self.luck)
        return NormalDist().cdf(self.slack / error)

    def broken_limits(self, objective: Objective) -> list[str]:
        """Return the options whose limits it does not keep."""
        memory, first = objective.max_memory_bytes, objective.max_first_call_s
        is_large = memory is not None and (self.peak_bytes is None or self.peak_bytes > memory)
        is_late = first is not None and (self.first_call_s is None or self.first_call_s > first)
        return ["--max-memory"] * is_large + ["--max-first-call"] * is_late

    def keeps(self, objective: Objective) -> bool:
        """Whether it was measured and keeps the limits of memory and of the first call."""
        return self.is_measured and not self.broken_limits(objective)

    def value(self, objective: Objective, failed: float = -math.inf) -> float:
        """Return the gain if it may be proposed; `failed` otherwise."""
        if not self.keeps(objective) or self.gate is Gate.FAILED or self.is_ruined:
            return failed
        if self.slack is not None and self.slack < 0 and failed == -math.inf:
            return failed
        return self.own_gain

    def to_json(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.text,
            "outcome": self.outcome.value,
            "rung": self.rung.name.lower(),
            "gain": None if self.gain is None else math.exp(self.gain),
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "first_call_s": self.first_call_s,
            "quality": None if self.gate is None else self.gate.value,
            "images": self.images,
            "reason": self.reason,
        }


def result_of_row(
    row: Row,
    baseline: Row,
    rung: Rung,
    objective: Objective,
    steps_left: float = 0.0,
    final_prompts: float = 0.0,
    sure: float = _SURE,
) -> Result | None:
    """Return the result of a row; None for a recipe that this version of vivace cannot read.

    The time of the steps is scaled up by `steps_left`, the workload's steps over the measured ones, less one.
    `final_prompts` will decide on quality; 0 for only these. Further seeds of a prompt count as the root of their
    number, since images of one prompt are correlated. `sure` is the confidence of each look of the final that a recipe
    passes.
    """
    recipe = recipe_of(row.record)
    if recipe is None:
        return None
    if row.record.outcome is not Outcome.MEASURED or row.latency is None or baseline.latency is None:
        return Result(recipe, row.record.outcome, rung, reason=row.record.reason)
    seconds, before = (
        latency.median.point + steps_left * of.stages_s.get("steps", 0.0)
        for of, latency in ((row, row.latency), (baseline, baseline.latency))
    )
    slack, slack_error, luck = (
        (None, _PROVEN_ERROR, _LUCK)
        if row.is_baseline
        else slack_of(row, row.limits, final_prompts, sure, of_the_final=rung is Rung.FINAL)
    )
    low = None if row.speedup is None else row.speedup.low
    error = max(
        _log_error(row.speedup, _UNKNOWN_ERROR), _DISTURBED_ERROR if row.is_disturbed else _LEAST_ERROR
    )
    result = Result(
        recipe=recipe,
        outcome=Outcome.MEASURED,
        rung=rung,
        gain=math.log(before / seconds),
        error=min(error, 0.3),
        slack=slack,
        slack_error=slack_error,
        luck=luck,
        images=0 if row.fidelity is None else row.fidelity.num_pictures,
        own_error=_log_error(row.latency.median, 0.0),
        busy_share=None if row.gpu_busy_s is None else row.gpu_busy_s / row.latency.median.point,
        seconds=seconds,
        peak_bytes=None if row.memory is None else float(row.memory.peak_bytes),
        first_call_s=row.first_call_s,
        stages_s=tuple((row.stages_s or {}).items()),
        least_gain=None if low is None else math.log(low) if low > 0 else -math.inf,
    )
    if row.is_baseline:
        result = replace(result, gate=Gate.PASSED)
    elif row.judgement is not None:
        result = replace(result, gate=row.judgement.gate, reason=row.judgement.reason)
    if not objective.measures_memory:
        return result
    if not result.peak_bytes or baseline.memory is None:
        return Result(recipe, Outcome.UNSUPPORTED, rung, reason="its memory could not be measured")
    gain = math.log(baseline.memory.peak_bytes / result.peak_bytes)
    return replace(result, gain=gain, error=_LEAST_ERROR, own_error=0.0, least_gain=None)


def recipe_of(record: Record) -> Recipe | None:
    """Return a record's recipe; None if this version of vivace cannot read it."""
    try:
        return Recipe.from_spec(record.trial.recipe)
    except RecipeError:
        return None


def slack_of(
    row: Row,
    limits: Limits,
    final_prompts: float = 0.0,
    sure: float = _SURE,
    *,
    of_the_final: bool = False,
) -> tuple[float | None, float, float]:
    """Return the smallest margin of a row's figures above their limits, its error and luck; see `expected_low`."""
    fidelity = row.fidelity
    if row.judgement is not None and row.judgement.figure == "broken":
        return -2 * RUINED, _PROVEN_ERROR, 0.0
    if fidelity is None:
        return None, _PROVEN_ERROR, _LUCK
    minima = {"clip": limits.for_scorer(None).clip, "witness": limits.witness}
    if row.record.trial.recipe.same_picture:
        minima["match"] = limits.match
    slacks = []
    for name, limit in minima.items():
        kept = getattr(fidelity, name)
        if kept is not None and isinstance(limit, float):
            reached, error, luck = expected_low(
                kept.bounds,
                fidelity.num_prompts,
                fidelity.num_pictures,
                final_prompts,
                sure,
                of_the_final=of_the_final,
            )
            slacks.append((reached - limit, error, luck))
    return min(slacks, default=(None, _PROVEN_ERROR, _LUCK))


def expected_low(
    bounds: Interval,
    prompts: int,
    images: int,
    final: float,
    sure: float = _SURE,
    *,
    of_the_final: bool = False,
) -> tuple[float, float, float]:
    """Return the lower bound expected of all images of the final, its error, and the luck of the images to come.

    The point moves as means of samples do, and the interval shrinks with the root of their number. The error is of the
    images seen, so what is known of other recipes makes it smaller; the luck is of images that nobody has seen.

    `prompts` and `images` are those of the bounds, `final` the prompts of the final, `sure` the confidence of each of
    its looks. With `of_the_final` these are the first of its images, with bounds as sure as that; else it draws others.
    """
    if bounds.low is None:
        return bounds.point, 2 * RUINED, 0.0
    reach = bounds.point - bounds.low
    if reach <= 0:
        return bounds.low, _PROVEN_ERROR, 0.0
    more = max(1.0, math.sqrt(final / math.sqrt(prompts * images)))  # further seeds count as their root
    error = reach / student_t(sure if of_the_final else _SURE, prompts - 1)
    at_the_end = error / more * student_t(sure, (final if more > 1.0 else prompts) - 1)
    # A final's mean has its first images in it, or is of others only.
    luck = error * math.sqrt(1 - 1 / more**2) if of_the_final else error / more if final else 0.0
    return bounds.point - at_the_end, max(_PROVEN_ERROR, error), luck


def _log_error(interval: Interval | None, unknown: float) -> float:
    """Return the standard error of the logarithm of what a 95 % interval is of."""
    if interval is None or interval.low is None or interval.high is None or interval.low <= 0:
        return unknown
    return math.log(interval.high / interval.low) / (2 * 1.96)


def latest(history: Sequence[Result]) -> dict[Recipe, Result]:
    """Return the most thorough result of each recipe; of equals, the last."""
    by_recipe: dict[Recipe, Result] = {}
    for result in history:
        if result.recipe not in by_recipe or result.rung >= by_recipe[result.recipe].rung:
            by_recipe[result.recipe] = result
    return by_recipe


def floor_of(history: Sequence[Result], objective: Objective) -> float:
    """Return the gain that a proposal must exceed: the baseline's, 0, unless it breaks a limit itself."""
    baseline = next((result for result in history if result.recipe.is_baseline and result.is_measured), None)
    return 0.0 if baseline is None or baseline.keeps(objective) else ANY_GAIN


def best_of(history: Sequence[Result]) -> Result | None:
    """Return the best result so far whose quality has not failed; None if none is better than the baseline."""
    candidates = [
        result
        for result in latest(history).values()
        if result.is_measured
        and not result.is_ruined
        and result.own_gain > 0
        and not result.recipe.is_baseline
    ]
    return max(candidates, key=lambda result: (result.rung > Rung.SCREENED, result.own_gain), default=None)


def shortest_as_fast(best: Result, others: Sequence[Result]) -> Result:
    """Return the recipe with the fewest techniques that is as fast, as far as measured."""
    shortest, _ = simplest_of_best(
        best,
        [best, *others],
        _is_shorter_and_as_fast,
        lambda result: (len(result.recipe.techniques), -result.own_gain),
    )
    return shortest


def _is_shorter_and_as_fast(result: Result, best: Result) -> bool:
    theirs, mine = set(result.recipe.techniques), set(best.recipe.techniques)
    error = 1.96 * math.hypot(result.own_error, best.own_error)
    gap = best.own_gain - result.own_gain
    if theirs < mine and gap <= max(_AS_FAST, min(_NOISE, error)):
        return True
    return len(theirs) < len(mine) and gap <= _ANOTHER


class Measurer(Protocol):
    """Measures recipes and returns their results. Failures are outcomes, never exceptions.

    `refuse` measures nothing and returns those that cannot work here; `screen` takes a few calls, without quality;
    `judge` all steps, with quality by few prompts; `prove` is interleaved with the baseline, with quality by the first
    images; `draw_more` draws the next batch of images of proven recipes, and returns those with new ones, if any.
    """

    def refuse(self, recipes: Sequence[Recipe]) -> list[Result]: ...
    def screen(self, recipes: Sequence[Recipe]) -> list[Result]: ...
    def judge(self, recipes: Sequence[Recipe]) -> list[Result]: ...
    def prove(self, recipes: Sequence[Recipe]) -> list[Result]: ...
    def draw_more(self, recipes: Sequence[Recipe]) -> list[Result]: ...


class Watcher(Protocol):
    """Observer of a search, for a terminal."""

    def note(self, text: str) -> None: ...
    def measured(self, result: Result, history: Sequence[Result]) -> None: ...
    def final(self, finalists: Sequence[Recipe]) -> None: ...


class Unwatched:
    """An observer that does nothing."""

    def note(self, text: str) -> None: ...
    def measured(self, result: Result, history: Sequence[Result]) -> None: ...
    def final(self, finalists: Sequence[Recipe]) -> None: ...
