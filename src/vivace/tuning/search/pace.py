"""Durations of measurements: the cost of a trial and of the final, before they begin.

Estimates use the baseline's seconds, those of recipes where they were measured, and the overhead of rounds beyond their
calls.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from vivace.errors import RecipeError
from vivace.evidence.recorded import all_recorded
from vivace.machinery.technique import Technique, Trait
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.techniques.compile import Compile
from vivace.tuning.search.results import Result
from vivace.tuning.search.space import is_recommended

WARM_UP = 2
SCREENING = 3  # timed calls
_MOST_REPEATS, _FEWEST_REPEATS = 6, 3
_LONG_S = 15.0  # of the baseline's timed calls in a round of the final: slow calls are steady, so fewer do
_TRACED_ON_A_GPU = 2.0  # calls: a round ends with one whose kernels are traced, at half its speed or more
_USUAL_OVERHEAD_S = 2.0
_USUAL_SCORING_S = 0.05  # of an image
_USUAL_READING_S = 3.0  # the scorer, in each quality pass
_WARM, _WARM_ON_A_CPU = 0.25, 0.5  # of a first call, where the compiler has kept its code

# Cold first calls of FLUX.1 [dev] on one H200 (results/techniques-flux-dev-compiling.json): whole 51 to 107 s, by its
# blocks 15 s. Where a CPU compiles a small model for itself it takes 9 to 46 s a graph, and more on a busy one.
_COMPILING_S = {"whole": 80.0, "blocks": 18.0, "other": 20.0}
_ON_A_CPU = 2.0
_UNUSUAL = 4.0  # modes that no technique declares worth tuning, because they autotune kernels


@dataclass
class Pace:
    """Estimates seconds of trials and finals, of `batch` images a call."""

    on_gpu: bool
    batch: int = 1
    base_s: float = 1.0  # of one call of the baseline, at full steps
    few_s: float | None = None  # of one with the few steps of a screening; None where screening takes all
    overhead_s: list[float] = field(
        default_factory=list
    )  # of rounds beyond their calls: starting and loading
    scoring_s: float = _USUAL_SCORING_S  # of an image, in the quality pass
    reading_s: float = _USUAL_READING_S  # what a quality pass takes beyond its images
    long_s: float = _LONG_S  # of the baseline's timed calls in a round of the final
    reported_s: float = 0.0  # of compiling this model's whole denoiser; see `typical_compile_s`
    _compiled_s: dict[frozenset[Technique], float] = field(default_factory=dict)
    _first_s: dict[Recipe, float] = field(default_factory=dict)

    @property
    def repeats(self) -> int:
        """Timed calls of each round of the final."""
        return max(_FEWEST_REPEATS, min(_MOST_REPEATS, int(self.long_s / max(self.base_s, 1e-3))))

    def of_round(self) -> float:
        """Return the usual seconds of a round beyond its calls."""
        return statistics.mean(self.overhead_s[-5:]) if self.overhead_s else _USUAL_OVERHEAD_S

    def of_compiling(self, recipe: Recipe) -> float:
        """Estimate the extra seconds of a recipe's first call, for code that the compiler has not cached yet."""
        seconds_in_all = 0.0
        for technique in recipe:
            if Trait.COMPILED not in technique.facts.provides:
                continue
            for component in technique.targets or ("denoiser",):
                kind = "whole" if Trait.COMPILED_WHOLE in technique.facts.provides else "blocks"
                seconds = _COMPILING_S[kind if component == "denoiser" else "other"]
                if kind == "whole" and component == "denoiser":
                    seconds = max(seconds, self.reported_s)
                seconds_in_all += seconds if is_recommended(technique) else _UNUSUAL * seconds
        if not seconds_in_all:
            return 0.0
        if recipe in self._first_s:
            return self._first_s[recipe]
        seconds_in_all *= 1.0 if self.on_gpu else _ON_A_CPU
        compiled_s = self._compiled_s.get(_compiled(recipe))
        return seconds_in_all if compiled_s is None else max(compiled_s, seconds_in_all / 4)

    def of_trial(self, recipe: Recipe) -> float:
        """Estimate the seconds of a screening."""
        call_s = self.base_s if self.few_s is None or not recipe.same_picture else self.few_s
        return self.of_round() + (SCREENING + WARM_UP) * call_s + self.of_compiling(recipe)

    def of_final(self, finalists: Sequence[Result], rounds: int, images: int, *, drawn: int = 0) -> float:
        """Estimate the seconds of a final, without its canaries, which are left out where no time is left for them.

        Args:
            images: that are drawn of each recipe for its quality; 0 if quality is not judged.
            drawn: images of the baseline that an earlier final has drawn.
        """
        later = sum(self.of_final_round(result, 0) for result in (None, *finalists)) * (rounds - 1)
        first = sum(self.of_final_round(result, images) for result in finalists)
        first += self.of_final_round(None, max(0, images - drawn))
        return first + later + self.of_quality(1 + len(finalists), images)

    def of_images(self, finalists: Sequence[Result], images: int, *, drawn: int = 0) -> float:
        """Estimate the seconds of a further batch of images with its quality pass; for arguments see `of_final`."""
        drawing = sum(self.of_drawing(result, images) for result in finalists)
        drawing += self.of_drawing(None, max(0, images - drawn))
        return drawing + self.of_quality(1 + len(finalists), images)

    def of_drawing(self, result: Result | None, images: int) -> float:
        """Estimate the seconds of a round that draws images, of the baseline if `result` is None."""
        return self._of_calls(result, 1 + max(1.0, images / self.batch))

    def of_final_round(self, result: Result | None, images: int) -> float:
        """Estimate the seconds of a round of the final with its images, of the baseline if `result` is None."""
        traced = _TRACED_ON_A_GPU if self.on_gpu else 0.0
        more = max(0.0, images / self.batch - self.repeats)
        return self._of_calls(result, self.repeats + WARM_UP + traced + more)

    def _of_calls(self, result: Result | None, calls: float) -> float:
        seconds, first = self.base_s, 0.0
        if result is not None:
            seconds = self.batch * result.seconds if result.seconds else self.base_s
            first = max(0.0, (result.first_call_s or 0.0) - seconds)
        warm = _WARM if self.on_gpu else _WARM_ON_A_CPU
        return calls * seconds + warm * first + self.of_round()

    def of_quality(self, recipes: int, images: int) -> float:
        """Estimate the seconds of the quality pass, which compares all images."""
        return self.reading_s + self.scoring_s * recipes * images if images else 0.0

    def note_quality(self, images: int, drawn: int, seconds: float) -> None:
        """Record the time of a quality pass that drew images of the baseline and compared others."""
        if images:
            self.reading_s = max(0.0, seconds - self.base_s * drawn / self.batch - self.scoring_s * images)

    def note(self, calls_s: float, rounds: int, seconds: float) -> None:
        """Record the time of a comparison, and how many of its seconds were calls."""
        if rounds and seconds > calls_s:  # else the rounds were stored already
            self.overhead_s.append((seconds - calls_s) / rounds)

    def learn(self, results: Sequence[Result]) -> None:
        """Record the first calls of compiled recipes: the compiler keeps its code."""
        for result in results:
            if result.first_call_s is not None and result.seconds is not None and _compiled(result.recipe):
                seconds = max(0.0, result.first_call_s - self.batch * result.seconds)
                self._compiled_s[_compiled(result.recipe)] = seconds
                self._first_s[result.recipe] = seconds


def typical_compile_s(model: str) -> float:
    """Return a high quantile of recorded first calls with the denoiser compiled whole, in seconds; 0 if none is."""
    seconds = [
        figures.first_call_s
        for (name, text, _, _), every in all_recorded().items()
        if name == model and _is_compiled_whole(text)
        for figures in every
    ]
    return statistics.quantiles(seconds, n=4)[2] if len(seconds) > 1 else sum(seconds)


def _is_compiled_whole(text: str) -> bool:
    """Whether a recipe compiles the denoiser alone, in the usual mode."""
    try:
        compiled = _compiled(resolve(text))
    except RecipeError:  # of an older vivace
        return False
    return compiled == {Compile()}


def _compiled(recipe: Recipe) -> frozenset[Technique]:
    """Return the techniques that compile."""
    return frozenset(technique for technique in recipe if Trait.COMPILED in technique.facts.provides)
